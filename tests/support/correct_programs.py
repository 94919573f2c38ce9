# SPDX-License-Identifier: Apache-2.0
"""Small programs that are right, of both kinds, with a test each whose answer another implementation gave."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

Numbers = Sequence[int]

# Deep recursion in a thread with a large stack, as programs of competitions have it.
DEEP = """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main(): print(sum(map(int, input().split())) + depth(20000))
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
MAIN = """
def main():
    print(len(set(input().split())))
    exit(0)
if __name__ == '__main__':
    main()
"""
# Source of a program that reads numbers from one line, and what it prints.
PRINTING: dict[str, Callable[[Numbers], object]] = {
    "print(sum(map(int, input().split())))": sum,
    "import sys\nprint(max(int(x) for x in sys.stdin.read().split()))": max,
    "x = [int(v) for v in input().split()]\nx.sort()\nprint(*x)": lambda x: " ".join(map(str, sorted(x))),
    "from collections import Counter\nprint(Counter(input().split()).most_common(1)[0][1])": lambda x: max(
        Counter(x).values()
    ),
    "import math\nprint(math.sqrt(sum(int(v) ** 2 for v in input().split())))": lambda x: math.hypot(*x),
    "x = list(map(int, open(0).read().split()))\nprint('%.3f' % (sum(x) / len(x)))": lambda x: (
        f"{sum(x) / len(x):.3f}"
    ),
    DEEP: lambda x: sum(x) + 20000,
    "print(2 ** (10 * sum(map(int, input().split()))))": lambda x: 2 ** (10 * sum(x)),
    MAIN: lambda x: len(set(x)),
}
# Source of a function f, or of a class with the method f, of a list of numbers, and what it returns.
RETURNING: dict[str, Callable[[Numbers], object]] = {
    "def f(x): return sum(x)": sum,
    "class Solution:\n    def f(self, x): return sorted(x)": sorted,
    "def f(x):\n    print('noise')\n    return len(x) > 3": lambda x: len(x) > 3,
    "from typing import List\ndef f(x: List[int]) -> float: return sum(x) / len(x)": lambda x: sum(x) / len(x),
    "import functools\n@functools.lru_cache\ndef g(n): return n if n < 2 else g(n - 1) + g(n - 2)\n"
    "def f(x): return g(90) + len(x)": lambda x: 2880067194370816120 + len(x),
    "def f(x): return None if x else 1": lambda x: None,
}


def correct_programs(number: int, seed: int) -> list[tuple[str, str]]:
    """So many programs, each with the text of its tests."""
    draw = random.Random(seed)
    found = []
    for i in range(number):
        kinds = RETURNING if i % 2 else PRINTING
        source, answer = list(kinds.items())[i // 2 % len(kinds)]
        numbers = [draw.randint(0, 99) for _ in range(draw.randint(1, 9))]
        tests: dict[str, object]
        if i % 2:
            tests = {"fn_name": "f", "inputs": [[numbers]], "outputs": [answer(numbers)]}
        else:
            tests = {"inputs": [" ".join(map(str, numbers)) + "\n"], "outputs": [f"{answer(numbers)}\n"]}
        found.append((f"# {i}\n{source}\n", json.dumps(tests)))
    return found
