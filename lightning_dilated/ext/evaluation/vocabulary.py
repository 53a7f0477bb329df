"""The sentences of the text form: statements of values, questions for them, and the filler between them."""

from __future__ import annotations

import numpy as np

_ADJECTIVES = (
    "amber azure brass bronze cedar cobalt copper coral crimson crystal dusty ebony emerald faded frosty gentle golden "
    "granite hidden hollow indigo iron ivory jade lemon lilac lunar maple marble misty mossy navy noble olive opal pearl "
    "plain polar purple quiet ruby rusty sandy scarlet silent silver smoky solar velvet violet"
)
_NOUNS = (
    "anchor badger beacon beetle bishop candle canyon castle cobra comet condor cricket dolphin dragon eagle falcon ferret "
    "fossil gecko glacier hammer harbor heron island jaguar kestrel lantern lizard magnet meadow meteor mirror monkey otter "
    "panther parrot pepper pigeon planet puffin rabbit ribbon rocket salmon saddle spider temple thunder turtle walnut"
)
#: number of different keys
KEYS = len(_ADJECTIVES.split()) * len(_NOUNS.split())

_PEOPLE = (
    "baker farmer teacher sailor painter doctor singer gardener miller tailor driver student writer neighbour shepherd "
    "carpenter"
)
_DEEDS = (
    "carried found lost repaired sold bought described wanted dropped cleaned borrowed painted remembered noticed forgot "
    "admired"
)
_THINGS = (
    "basket blanket bottle bucket carpet chair coat cup drum fence jacket kettle ladder letter pillow plate shovel stool "
    "table umbrella"
)
_WHERE = (
    "after the rain,before noon,behind the house,by the river,during the winter,in the evening,in the garden,near the "
    "station,on a Monday,on the way home,under the bridge,with great care"
)
#: number of different lines of filler
_LINES = 2000

BEGINNING = {
    "needle": "Somewhere in these lines a thing has a code. The last line asks for it.\n",
    "multi_key": "Many things have codes in these lines. The last line asks for one of them.\n",
    "multi_value": "In these lines a thing has several codes. The last line asks for all of them.\n",
    "tracing": "In these lines variables get values. The last line asks for the value of one.\n",
}


def key_name(number: int) -> str:
    """Return the key's two words."""
    nouns = _NOUNS.split()
    return f"{_ADJECTIVES.split()[number // len(nouns)]}-{nouns[number % len(nouns)]}"


def statement(task: str, key: int, value: int | None, other: int | None) -> str:
    """Return the line that states a key's value."""
    if task == "tracing":
        return f"Variable {key_name(key)} is {value if other is None else f'equal to {key_name(other)}'}.\n"
    return f"{'A' if task == 'multi_value' else 'The'} code of {key_name(key)} is {value}.\n"


def question(task: str, key: int, count: int) -> str:
    """Return the last line, up to the answer."""
    name = key_name(key)
    if task == "tracing":
        return f"Which number is variable {name} equal to? Variable {name} is"
    if task == "multi_value":
        return f"Which {count} codes does {name} have, in the order of the lines? The codes of {name} are"
    return f"What is the code of {name}? The code of {name} is"


def answer(values: list[int]) -> str:
    """Return the end of the last line, after the question."""
    return " " + ", ".join(map(str, values))


def filler_lines() -> list[str]:
    """Return sentences without numbers or keys; every call returns the same sentences."""
    rng = np.random.default_rng(0)
    parts = (_PEOPLE.split(), _DEEDS.split(), _THINGS.split(), _WHERE.split(","))
    drawn = zip(*(rng.integers(0, len(part), _LINES).tolist() for part in parts), strict=True)
    lines = ([part[i] for part, i in zip(parts, row, strict=True)] for row in drawn)
    return [f"The {person} {deed} the {thing} {where}.\n" for person, deed, thing, where in lines]
