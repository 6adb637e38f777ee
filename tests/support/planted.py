"""Mistakes planted into the package, one at a time, and what a rehearsal says of them."""

from __future__ import annotations

import gc
import importlib.machinery
import multiprocessing
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bapo_megatron.config import RunConfig
from bapo_rehearsal.records import RankRequest, RankResult

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mistake:
    """One mistake: text of a file that is replaced by other text of as many lines."""

    file: str
    right: str
    wrong: str
    seen: str = ""
    """Text of the line at which the rehearsal reports it; empty: the mistake's own line."""
    seen_in: str = ""
    """File of that line; empty: the mistake's own file."""

    @property
    def line(self) -> str:
        """``file:line`` at which it must be reported."""
        text = (ROOT / self.file).read_text()
        assert self.right in text, f"{self.file} has no {self.right!r}"
        assert self.right.count("\n") == self.wrong.count("\n")
        file = self.seen_in or self.file
        before, found, _ = (ROOT / file).read_text().partition(self.seen or self.right)
        assert found, f"{file} has no {self.seen!r}"
        return f"{file}:{before.count(chr(10)) + 1}"


def rehearse_with(mistake: Mistake, config: RunConfig, rank: int, packs: int) -> RankResult:
    """The rehearsal of one rank of a program with the mistake, in a process of its own."""
    assert mistake.line
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(mistake, RankRequest(config, rank, packs), sender))
    process.start()
    sender.close()
    result: RankResult = receiver.recv()
    process.join()
    return result


def _child(mistake: Mistake, request: RankRequest, sender: Connection) -> None:
    gc.freeze()
    path = str(ROOT / mistake.file)
    loaders = importlib.machinery.SourceFileLoader
    plain, stats = loaders.get_data, loaders.path_stats

    def get_data(loader: Any, name: str) -> bytes:
        data = plain(loader, name)
        return data.replace(mistake.right.encode(), mistake.wrong.encode(), 1) if name == path else data

    def path_stats(loader: Any, name: str) -> Any:
        if name == path:
            raise OSError("no compiled file: it would be of the right source")
        return stats(loader, name)

    loaders.get_data, loaders.path_stats = get_data, path_stats  # type: ignore[method-assign]
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.startswith(("bapo_megatron", "bapo_rehearsal"))]:
        del sys.modules[name]
    from bapo_rehearsal.rank import rehearse_rank

    sender.send(rehearse_rank(request, "torch"))
