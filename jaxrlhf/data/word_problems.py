"""One-step word problems in the manner of GSM8K, made from a seed: nothing to download.

A problem is a template and two numbers. Which (template, numbers) pairs are held out is fixed once
for all: no seed's training problems meet any seed's validation problems. Numbers are such that
every answer is a whole number of at least 2: sums and products of 2 to 9, and their inverses.

Demonstrations show how to answer, and most of them are spoilt on purpose: some templates are
mostly answered without the ``####`` line, some with the wrong operator, the rest are clean. A model
warmed up on them answers a middling share of problems, and has seen the right way for each
template some of the time, so reinforcement learning has something to select from.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxrlhf.data.tables import Record

DATA_SOURCE = "jaxrlhf/word_problems"
HELD_OUT_PER_TEMPLATE = 8
NAMES = ("Tom", "Ann", "Raj", "Mia", "Leo", "Zoe", "Kofi", "Yuki", "Omar", "Ines", "Finn", "Lola")
ITEMS = ("apples", "pens", "coins", "shells", "stamps", "cards", "beads", "kites", "mugs", "plums")

TEMPLATES: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {items} and buys {b} more. How many {items} does {name} have now?",
        "{name} found {a} {items} on Monday and {b} on Friday. How many in total?",
        "There are {a} red {items} and {b} blue {items}. How many {items} are there?",
        "{name} read {a} pages today and {b} pages yesterday. How many pages is that?",
        "A bus carries {a} children and {b} adults. How many people ride it?",
        "{name} walked {a} miles, then {b} miles further. How far did {name} walk?",
        "A basket holds {a} {items}. {name} adds {b}. How many are in it?",
        "{name} is {a} years old. How old is {name} {b} years from now?",
    ),
    "-": (
        "{name} had {a} {items} and lost {b}. How many {items} are left?",
        "{name} baked {a} pies and sold {b} of them. How many pies remain?",
        "Of {a} birds in a tree, {b} fly away. How many birds stay?",
        "{name} is {a} and Sam is {b}. How many years apart are they?",
        "A rope of {a} feet is cut by {b} feet. How long is it afterwards?",
        "{name} needs {a} dollars but owns {b}. How much money is missing?",
        "A shelf held {a} books. {name} took {b}. How many books are still there?",
        "From {a} eggs {name} uses {b} for a cake. How many eggs are unused?",
    ),
    "*": (
        "There are {a} bags with {b} {items} each. How many {items} are inside?",
        "{name} runs {a} miles every day for {b} days. How many miles altogether?",
        "One ticket costs {a} dollars. What do {b} tickets cost?",
        "{name} plants {a} rows of {b} trees. How many trees does {name} plant?",
        "A team has {a} players. How many players do {b} teams have?",
        "{name} earns {a} dollars an hour. How much is earned in {b} hours?",
        "Each of {a} friends brings {b} {items}. How many {items} do they bring?",
        "A wall is {a} feet tall and {b} feet wide. What is its area?",
    ),
    "/": (
        "{name} shares {a} {items} among {b} friends. How many does each friend get?",
        "{name} packs {a} {items} into {b} equal boxes. How many go in one box?",
        "A prize of {a} dollars is split by {b} winners. What does each receive?",
        "{name} reads {a} pages in {b} days. How many pages per day?",
        "A string of {a} feet makes {b} equal parts. How long is a part?",
        "A class of {a} students sits at {b} tables. How many sit at one table?",
        "It takes {a} minutes to ride {b} laps. How long does one lap take?",
        "A farmer puts {a} hens evenly in {b} pens. How many hens per pen?",
    ),
}

# What a demonstration with the wrong operator uses: the first that gives another result.
_WRONG = {"+": "*-", "*": "+-", "-": "+*", "/": "-+"}
_COMPUTE = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


@dataclass(frozen=True)
class Problem:
    """A template, by operator and number within it, and its two numbers in order of the text."""

    operator: str
    template: int
    a: int
    b: int

    @property
    def result(self) -> int:
        """The right answer."""
        return _COMPUTE[self.operator](self.a, self.b)

    def question(self, name: str, items: str) -> str:
        """The problem in words."""
        text = TEMPLATES[self.operator][self.template]
        return text.format(name=name, items=items, a=self.a, b=self.b)

    def solution(self, flaw: str = "") -> str:
        """The worked answer, two lines; ``flaw`` spoils it: "no_marker" or "wrong_operator"."""
        operator, result = self._wrong() if flaw == "wrong_operator" else (self.operator, None)
        result = self.result if result is None else result
        line = f"{self.a} {operator} {self.b} = {result}"
        return line if flaw == "no_marker" else f"{line}\n#### {result}"

    def _wrong(self) -> tuple[str, int]:
        results = ((o, _COMPUTE[o](self.a, self.b)) for o in _WRONG[self.operator])
        return next((o, result) for o, result in results if result != self.result)


@cache
def problems(split: str) -> tuple[Problem, ...]:
    """All problems of a split: "train" or "val" (eight of each template's 64 pairs of numbers)."""
    if split not in ("train", "val"):
        raise ValueError(f"split={split!r} is unknown; use train or val.")
    chosen = []
    for o, (operator, templates) in enumerate(TEMPLATES.items()):
        pairs = _pairs(operator)
        for template in range(len(templates)):
            # Neither the run's seed nor the split enters: the division is the same for everybody.
            order = np.random.default_rng([o, template]).permutation(len(pairs))
            cut = HELD_OUT_PER_TEMPLATE
            picked = order[:cut] if split == "val" else order[cut:]
            chosen += [Problem(operator, template, *pairs[i]) for i in picked]
    return tuple(chosen)


def generate(seed: int, n: int, *, split: str = "train") -> list[Record]:
    """``n`` records of a split in verl's schema, in a shuffled order.

    Each pass over the split's problems uses every one once, with names and things drawn anew.

    Args:
      seed: of the order, names and things; not negative.
      n: how many; validation problems are not repeated, so at most 256 of them.
      split: "train" or "val".

    Raises:
      ValueError: more validation problems than there are.
    """
    if split == "val" and n > len(problems("val")):
        raise ValueError(f"there are {len(problems('val'))} validation problems; ask for no more.")
    rng = np.random.default_rng([seed, ("train", "val").index(split)])
    return [_record(p, i, split, rng) for i, p in enumerate(_draw(problems(split), n, rng))]


def demonstrations(
    seed: int,
    n: int,
    *,
    spoil_probability: float = 0.8,
    no_marker: int = 3,
    wrong_operator: int = 2,
) -> list[Record]:
    """Training records with an answer to imitate, most of them spoilt on purpose.

    Of each operator's eight templates, ``no_marker`` ones lack the ``####`` line with probability
    ``spoil_probability`` and ``wrong_operator`` others use another operator; the rest is clean.
    Which templates are which depends on the seed.

    Args:
      seed: of everything drawn; not negative.
      n: how many.
      spoil_probability: for a record of a template that has a flaw.
      no_marker: templates of each operator that have the first flaw.
      wrong_operator: templates of each operator that have the second.

    Returns:
      Records as ``generate`` makes them, with ``extra_info["demonstration"]`` (the answer to
      imitate) and ``extra_info["flaw"]`` ("" when it is right).
    """
    rng = np.random.default_rng([seed, 2])
    plan = _flaw_plan(rng, no_marker, wrong_operator)
    records = []
    for index, problem in enumerate(_draw(problems("train"), n, rng)):
        record = _record(problem, index, "train", rng)
        spoilt = rng.random() < spoil_probability
        flaw = plan[problem.operator][problem.template] if spoilt else ""
        record["extra_info"] |= {"demonstration": problem.solution(flaw), "flaw": flaw}
        records.append(record)
    return records


def corpus() -> list[str]:
    """Texts that between them hold every word of every problem, answer and demonstration."""
    texts = []
    for problem in problems("train") + problems("val"):
        texts += [problem.question(NAMES[0], ITEMS[0]), problem.solution()]
        texts.append(problem.solution("wrong_operator"))
    for name in NAMES:
        texts += [f"{name} has", f"does {name} have"]  # first in a prompt, and inside it
    return [*texts, *(f"many {items}" for items in ITEMS)]


def _pairs(operator: str) -> list[tuple[int, int]]:
    small = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    if operator == "-":
        return [(a + b, b) for a, b in small]
    return [(a * b, b) for a, b in small] if operator == "/" else small


def _draw(pool: tuple[Problem, ...], n: int, rng: np.random.Generator) -> list[Problem]:
    passes = [rng.permutation(len(pool)) for _ in range(-(-n // len(pool)))]
    return [pool[i] for order in passes for i in order][:n]


def _record(problem: Problem, index: int, split: str, rng: np.random.Generator) -> Record:
    name, items = NAMES[rng.integers(len(NAMES))], ITEMS[rng.integers(len(ITEMS))]
    question = problem.question(name, items)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.result)},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": problem.solution(),
        },
    }


def _flaw_plan(
    rng: np.random.Generator, no_marker: int, wrong_operator: int
) -> dict[str, list[str]]:
    plan = {}
    for operator, templates in TEMPLATES.items():
        clean = len(templates) - no_marker - wrong_operator
        if min(clean, no_marker, wrong_operator) < 0:
            raise ValueError(
                f"{no_marker} + {wrong_operator} flawed templates do not fit in the "
                f"{len(templates)} of an operator; lower no_marker or wrong_operator."
            )
        flaws = ["no_marker"] * no_marker + ["wrong_operator"] * wrong_operator + [""] * clean
        plan[operator] = [flaws[i] for i in rng.permutation(len(flaws))]
    return plan
