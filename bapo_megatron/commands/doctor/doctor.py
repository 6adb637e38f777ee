"""Command ``bapo doctor [RECIPE] [flags of the recipe] [--json]``: runs all checks and prints their rows.

``run_doctor`` returns the exit code: 1 if a row is a problem, with which no run could start, else 0.
``all_rows`` yields the rows of each section: packages, SGLang, machine, code sandbox, recipe, its servers.
Rows are printed as they arrive; with ``--json``, all at the end. An exception in a section becomes its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.commands.doctor.machine import machine_rows, sandbox_rows
from bapo_megatron.commands.doctor.packages import package_rows
from bapo_megatron.commands.doctor.recipe import RecipeFacts, check_recipe
from bapo_megatron.commands.doctor.rows import DoctorRow, as_json, lines, one_line, summary_line
from bapo_megatron.commands.doctor.servers import server_rows
from bapo_megatron.commands.doctor.sglang import sglang_rows
from bapo_megatron.errors import ConfigError

USAGE = """\
usage: bapo doctor [RECIPE] [flags of the recipe] [--json]

What is installed, what the machine grants, what is missing, and the line that mends it. With a recipe: also
what would stop it, and whether the servers that it names can be used. Exit code 1 if a run could not
start. `bapo train RECIPE --help` lists the flags.
"""


@dataclass(frozen=True)
class DoctorArguments:
    """Command line of ``bapo doctor``, parsed by ``of``: recipe or None, its flags, whether to print JSON."""

    recipe: Path | None
    flags: tuple[str, ...] = ()
    json: bool = False

    @classmethod
    def of(cls, arguments: Sequence[str]) -> DoctorArguments:
        """Parse the command line. Raises ConfigError if flags come without a recipe."""
        left = [argument for argument in arguments if argument != "--json"]
        if left and left[0].startswith("-"):
            raise ConfigError(f"{left[0]}: the recipe comes first; {USAGE.splitlines()[0]}")
        recipe = Path(left[0]) if left else None
        return cls(recipe, tuple(left[1:]), len(left) < len(arguments))


def run_doctor(arguments: Sequence[str]) -> int:
    """Print the report; return 1 if a run could not start, else 0. Raises ConfigError for wrong flags."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    command = DoctorArguments.of(arguments)
    rows: list[DoctorRow] = []

    def arriving() -> Iterator[DoctorRow]:
        for row in all_rows(command):
            rows.append(row)
            yield row

    if command.json:
        print(as_json([*arriving()]))
    else:
        for line in lines(arriving()):
            print(line, flush=True)
        print(f"\n{summary_line(rows, str(command.recipe or 'a run'))}")
    return 1 if any(row.state == "problem" for row in rows) else 0


def all_rows(command: DoctorArguments) -> Iterator[DoctorRow]:
    """Yield every row of the report, section by section."""
    # The recipe is checked first, because the other sections need its facts, but printed last.
    told, facts = ([], None) if command.recipe is None else check_recipe(command.recipe, command.flags)
    need = facts or RecipeFacts()
    python = Path(need.python) if need.python else None
    colocated = need.starts_servers and need.colocated
    yield from guarded("training", package_rows)
    yield from guarded("SGLang", lambda: sglang_rows(need.starts_servers, python, colocated))
    yield from guarded("machine", lambda: machine_rows(Path(need.directory), need.disk_gb))
    yield from guarded("code sandbox", sandbox_rows)
    yield from told
    yield from guarded("servers", lambda: server_rows(need))


def guarded(section: str, rows: Callable[[], Iterator[DoctorRow]]) -> Iterator[DoctorRow]:
    """Yield the rows of a section; an exception becomes a row, so the report continues."""
    try:
        yield from rows()
    except Exception as error:  # an unforeseen machine must not cost the other sections
        found = f"could not be looked at: {type(error).__name__}: {one_line(error)}"
        yield DoctorRow(
            section, section, "optional", found, "", "look at it by hand: the doctor itself has an error here"
        )
