"""Programs judged by their tests, and everything that a program may try instead of solving the problem."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from bapo_megatron.reward.code import program_is_right
from bapo_megatron.reward.sandbox.sandbox import Sandbox
from tests.unit.reward.test_code_tests import ADD, ASSERTS, CALL, CHECK, FUNCTIONAL, PYTEST

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[3]

TWO = "class Solution:\n    def two(self, nums: List[int], target: int) -> List[int]:\n        return {}"

MIRROR = json.dumps(
    {
        "functional": "def check(turn):\n    assert is_same_tree(turn(tree_node([1, 2, 3, None, 4])), "
        "tree_node([1, 3, 2, None, None, 4]))\ncheck(Solution().mirrored)"
    }
)
TURNED = """class Solution:
    def turned(self, head: Optional[ListNode]) -> Optional[ListNode]:
        before = None
        while head:
            head.next, before, head = before, head, head.next
        return before"""
MIRRORED = """class Solution:
    def mirrored(self, root):
        return root and TreeNode(root.val, self.mirrored(root.right), self.mirrored(root.left))"""


WHOLE = json.dumps(
    {
        "test_code": "K = 2\ndef check(f):\n    for n in range(3):\n        assert f(n) == n * K\n"
        "    assert f(1) == 2",
        "entry_point": "double",
    }
)
"""With more than asserts: it stays whole."""


def right(ground_truth: str, source: str, case_limit_s: float = 5.0, total_limit_s: float = 60.0) -> bool:
    response = f"I think\n```python\n{source}\n```\nDone."
    return program_is_right(ground_truth, response, 512, case_limit_s, total_limit_s)


def test_a_program_counts_behind_the_thinking_part() -> None:
    """As a box does: a response that is cut off in its thoughts has given no program."""
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    responses = ("<think>so</think>\n{}", "<think>perhaps\n{}\nor", "<think>{}</think>\nIt adds them.")
    judged = [program_is_right(ADD, response.format(program), 512, 5.0, 60.0) for response in responses]
    assert judged == [True, False, False]


SCRIPTS = {
    "print(sum(map(int, input().split())))": True,
    "def main():\n    a, b = map(int, open(0).read().split())\n    print(a + b)\n"
    "if __name__ == '__main__':\n    main()": True,
    "import os\na, b = os.read(0, 99).split()\nos.write(1, b'%d' % (int(a) + int(b)))": True,
    "import numpy as np\nprint(np.array(input().split(), int).sum())\nexit()": True,
    "import atexit\ns = sum(map(int, input().split()))\natexit.register(lambda: print(s))": True,
    "import threading, time\ndef late():\n    s = sum(map(int, input().split()))\n    time.sleep(0.1)\n"
    "    print(s)\nthreading.Thread(target=late).start()": True,
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass P:\n    a: int\n"
    "print(sum(P(int(w)).a for w in input().split()))": True,
    "print(3)": False,
    "print(sum(map(int, input().split()))": False,
    "print(sum(map(int, input().split())))\n1 / 0": False,
    "print(sum(map(int, input().split())))\nimport time; time.sleep(99)": False,
    "x = " + "(" * 5000: False,
    "#" * 300_000 + "\nprint(sum(map(int, input().split())))": False,
}


@pytest.mark.parametrize(("source", "is_it"), SCRIPTS.items(), ids=range(len(SCRIPTS)))
def test_scripts(source: str, is_it: bool) -> None:
    assert right(ADD, source, case_limit_s=2.0) is is_it


FUNCTIONS = [
    (CALL, "def order(x): return sorted(x)", True),
    (CALL, "class Solution:\n    def order(self, x: List[int]): return sorted(x)", True),
    (CALL, "import numpy as np\norder = np.sort", True),
    (CALL, "def order(x):\n    print(x)\n    return sorted(x)", True),
    (CALL, "def order(x): return x", False),
    (CALL, "def other(x): return sorted(x)", False),
    (CALL, "def order(x): return sorted(x)\nif __name__ == '__main__':\n    input()", True),
    (ASSERTS, "double = lambda x: x * 2", True),
    (ASSERTS, "double = lambda x: 4", False),
    (CHECK, TWO.format("[0, 1]"), True),
    (CHECK, TWO.format("(0, 1)"), False),
    (CHECK, TWO.format("[math.floor(0.5), 1]"), True),
    ('["assert f(1) == {1, 2}"]', "def f(x): return {2, x}", True),
    ("[\"assert f(1) == (1, None, {'a': -1.5})\"]", "def f(x): return (x, None, dict(a=-1.5))", True),
    ('["assert not f()"]', "def f(): return 1", False),
    ('{"inputs": [["a"]], "outputs": [["aa"]], "fn_name": "f"}', "f = lambda s: s + s", True),
    (PYTEST, "double = lambda x: 2 * x\ndef shift(x): x.append(x.pop(0))", True),
    (PYTEST, "double = lambda x: 2 * x\ndef shift(x): pass", False),
    (FUNCTIONAL, TURNED, True),
    (FUNCTIONAL, TURNED.replace("return before", "return None"), False),
    (WHOLE, "def double(n): return 2 * n", True),
    (WHOLE, "def double(n): return 2", False),
    ("""["assert f() == [b'ab', 1 + 2j, {1}]"]""", "def f(): return [b'ab', 1 + 2j, {1}]", True),
    ("""["assert f() == b'ab'"]""", "def f(): return [97, 98]", False),
    # A name of the prelude is no solution.
    ('{"inputs": [[5]], "outputs": [120], "fn_name": "factorial"}', "x = 1", False),
    ('["assert factorial(5) == 120"]', "fact = lambda n: 120", False),
    ('["assert fib(5) == 5", "assert factorial(5) == 120"]', "fib = lambda n: 5", False),
    ("from solution import gcd\ndef test_it():\n    n = gcd(4, 6)\n    assert n == 2", "x = 1", False),
    ('["assert factorial(5) == 120"]', "from math import *", True),
    ('["assert f(5) == factorial(5)"]', "def f(n): return 120", True),
    # Cases do not see each other.
    ('{"inputs": ["", ""], "outputs": ["0", "0"]}', "print(globals().get('seen', 0))\nseen = 1", True),
    (MIRROR, MIRRORED, True),
    (MIRROR, MIRRORED.replace("(root.right)", "(None)"), False),
]


@pytest.mark.parametrize(("ground_truth", "source", "is_it"), FUNCTIONS)
def test_functions(ground_truth: str, source: str, is_it: bool) -> None:
    assert right(ground_truth, source) is is_it


def test_a_function_has_the_names_of_leetcode_and_livecodebench() -> None:
    source = """
class Solution:
    def order(self, x):
        assert [xor(5, 1), factorial(4), log10(100), mean([1, 3]), pow(2, 5, 7)] == [4, 24, 2, 2, 4]
        assert [ascii_lowercase[:2], string.digits[:2], loads("[1]")] == ["ab", "01", [1]]
        assert datetime.timedelta(1) == timedelta(1) and deepcopy([x]) == copy.deepcopy([x]) == [x]
        assert [bisect([1, 2], 1), bisect.bisect_left([1, 2], 1), bisect_right([1, 2], 1)] == [1, 0, 1]
        assert sub(3, 1) == reduce(sub, [3, 1]) and random.randint(1, 1) == randint(1, 1) == 1
        return sorted(x)"""
    assert right(CALL, source)
    assert not right(CALL, source.replace("xor", "exclusive_or"))


@pytest.mark.parametrize("source", ["", "@cache\n"], ids=["plain", "through C"])
def test_recursion_is_as_deep_as_in_livecodebench(source: str) -> None:
    deep = source + "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
    assert right('{"inputs": [[24000]], "outputs": [24000], "fn_name": "f"}', deep)
    script = f"from functools import cache\n{deep}print(f(24000))\n"
    assert right('{"inputs": [""], "outputs": ["24000"]}', script)
    assert not right('{"inputs": [""], "outputs": ["60000"]}', script.replace("24000", "60000"))


def test_all_tests_together_have_a_limit() -> None:
    slow = "import time\ntime.sleep(0.5)\nprint(sum(map(int, input().split())))"
    assert right(ADD, slow, case_limit_s=5.0, total_limit_s=20.0)
    start = time.monotonic()
    assert not right(json.dumps({"inputs": ["1 2"] * 50, "outputs": ["3"] * 50}), slow, total_limit_s=2.0)
    assert time.monotonic() - start < 24, "all 50 would take 25 s, on an idle machine too"


SOLVED = "\nprint(sum(map(int, input().split())))"
ATTACKS = {
    "loop in C": "9 ** (9 ** 9)",
    "ten gigabytes piecemeal": "x = [bytearray(1 << 20) for _ in range(10240)]" + SOLVED,
    "endless output that catches": "while True:\n    try: print('x' * 10000, flush=True)\n    except: pass",
    "huge file": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return repr([f(n + 1)])\nf(0)"
    + SOLVED,
}
"""What sandbox_attacks.py has not: of a whole program, and of its time."""


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_attacks_are_wrong_in_time(source: str) -> None:
    """Beyond ten times the limit on the clock the sandbox raises."""
    assert not right(ADD, source, case_limit_s=2.0)


def made(source: str) -> Sandbox:
    return Sandbox(source, "", 512, 10.0)


@pytest.fixture
def walls() -> None:
    with made("") as box:
        if box.notes:
            pytest.skip(f"this kernel does not permit the whole sandbox: {box.notes}")


@pytest.mark.usefixtures("walls")
def test_the_sandbox_directory_has_a_size_limit() -> None:
    assert not right(ADD, "for n in range(20): open(str(n), 'wb').write(bytes(4 << 20))" + SOLVED)
    assert right(ADD, "for n in range(4): open(str(n), 'wb').write(bytes(4 << 20))" + SOLVED)


@pytest.mark.usefixtures("walls")
def test_inside_there_is_nothing_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    source = """import os, sys
open('mine', 'w').write('1')
names = [name for name in os.environ if name.startswith(('WANDB', 'PYTHON'))]
modules = [name for name in sys.modules if name.startswith('bapo')]
result = [names, os.getcwd() == os.environ['HOME'], os.listdir(), modules]
"""
    with made(source) as box:
        folder = Path(box._box)
        ended = box.value("result", 10.0)
        assert ended is not None
        result = json.loads(str(ended.value))
        assert list(folder.iterdir()) == []  # its files are in memory
    nothing = ["list", []]
    assert result == ["list", [nothing, True, ["list", ["mine"]], nothing]]
    assert not folder.exists()


HOLDER = """
import sys
from bapo_megatron.reward.sandbox.sandbox import Sandbox
box = Sandbox("while True: pass", "", 512, 1000.0)
box.run("", 1000.0)
"""


def test_the_sandbox_ends_with_its_worker(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLDER]
    deadline = time.monotonic() + 40

    with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as holder:
        while len(found := psutil.Process(holder.pid).children(recursive=True)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        holder.kill()
    assert not psutil.wait_procs(found, timeout=40)[1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_what_a_job_is_told_costs_no_program(number: int) -> None:
    """Slurm may tell every process of a job to stop: the trainer saves then, and continues where it was."""
    with Sandbox("import time\ntime.sleep(1)\nprint(input())", "", 512, 20.0) as sandbox:
        root = psutil.Process(sandbox._child.pid)

        def tell() -> None:
            while len(found := [root, *root.children(recursive=True)]) < 3:  # walls, server, case
                time.sleep(0.01)
            time.sleep(0.2)
            for process in found:
                process.send_signal(number)

        teller = threading.Thread(target=tell)
        teller.start()
        ended = sandbox.run("7", 20.0)
        teller.join()
        assert ended is not None
        assert (ended.code, ended.output) == (0, "7\n")
