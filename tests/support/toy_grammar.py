# SPDX-License-Identifier: Apache-2.0
"""A toy grammar of English: sentences with their trees, sampled from 75 phrase rules and 125 words."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from nltk import Tree

# category: weight children | …; a category without a line here is a part of speech of WORDS.
RULES = """
S: 8 NP VP . | 2 PP , NP VP . | 2 ADVP , NP VP . | 2 SBAR , NP VP . | 1 S0 , CC S0 . | 1 S0 : S0 .
S: 1 NP ADVP VP . | 1 NP VP , SBAR . | 1 `` S0 , '' NP VPQ .
S0: 4 NP VP | 1 ADVP NP VP
STO: 1 VPTO
NP: 9 DT NN | 5 DT JJ NN | 4 NNP | 4 PRP | 2 NNS | 2 JJ NNS | 2 CD NNS | 1 PRP$ NN | 1 PRP$ JJ NN | 1 DT JJ JJ NN
NP: 2 NPB PP | 1 NPB SBARR | 1 NPB CC NPB | 1 NPL , NPL CC NPL | 1 NPP NN | 1 NPB PRN
NPB: 4 DT NN | 2 DT JJ NN | 1 NNP | 1 NNS
NPL: 1 NN | 1 NNS
NPP: 1 DT NN POS | 1 NNP POS
PRN: 1 -LRB- NP -RRB-
VP: 8 VBD NP | 4 VBD PP | 4 VBD NP PP | 2 VBD | 2 VBD SBART | 2 VBZ ADJP | 2 VBZ NP | 2 MD VPI | 1 VBD ADVP
VP: 1 VPC CC VPC | 1 VBD STO | 1 VBZ VPN | 1 VBZ RB VPN
VPC: 2 VBD NP | 1 VBD PP | 1 VBD
VPI: 3 VB NP | 1 VB PP | 1 VB
VPN: 2 VBN PP | 1 VBN
VPQ: 1 VBD
VPTO: 1 TO VPI
PP: 8 IN NP | 1 IN IN NP
ADJP: 3 JJ | 2 RB JJ | 1 JJ PP
ADVP: 3 RB | 1 RB RB
SBAR: 1 INS S0
SBART: 1 INT S0
SBARR: 1 WHNP SR
WHNP: 1 WP
SR: 1 VPC
"""

# Categories that differ only in what they hold, by the name that the tree shows.
SHOWN = {"S0": "S", "STO": "S", "SR": "S", "NPB": "NP", "NPL": "NP", "NPP": "NP", "SBART": "SBAR", "SBARR": "SBAR"}
SHOWN |= {name: "VP" for name in ("VPC", "VPI", "VPN", "VPQ", "VPTO")} | {"INS": "IN", "INT": "IN"}

WORDS = """
DT the the the a a this every some
NN fox dog cat house garden river letter teacher doctor child story window table road song book
NNS foxes dogs cats houses letters teachers children stories books birds apples roads
NNP Anna Tom Maria Paris London
PRP she he it they we I you
PRP$ her his their my
JJ quick brown lazy old small happy strange quiet green long good
CD two three seven
VBD saw liked chased found heard read wrote slept walked jumped left said asked
VBZ is was
VBN seen found written lost
VB see like find hear read sleep walk jump
MD will can must should
TO to
RB quickly often never there very yesterday slowly now
IN in on over under near with of behind
INS because when if while
INT that
WP who which
CC and or but
POS 's
`` "
'' "
-LRB- (
-RRB- )
, ,
. . . . . . . ? !
: ; :
"""

NO_BLANK_BEFORE = {",", ".", ":", "''", "-RRB-", "POS"}
NO_BLANK_AFTER = {"``", "-LRB-"}
MAX_WORDS = 24


@dataclass(frozen=True)
class ToySentence:
    """What benepar asks of an example, and the text.

    Attributes:
        tree: with TOP above S, as in a treebank.
        words: as they stand in the text.
        space_after: per word whether a blank follows.
    """

    tree: Tree
    words: list[str] = field(repr=False)
    space_after: list[bool] = field(repr=False)

    @property
    def text(self) -> str:
        """The sentence."""
        pairs = zip(self.words, self.space_after, strict=True)
        return "".join(word + " " * space for word, space in pairs)

    def leaves(self) -> list[str]:
        """The words."""
        return self.words

    def pos(self) -> list[tuple[str, str]]:
        """(word, part of speech) of each."""
        pairs: list[tuple[str, str]] = self.tree.pos()
        return pairs


def sample_sentences(seed: int, count: int, unlike: frozenset[str] = frozenset()) -> list[ToySentence]:
    """Different sentences of at most MAX_WORDS words.

    Args:
        seed: of the choice.
        count: number of sentences.
        unlike: texts that are not wanted.
    """
    chance = random.Random(seed)
    found: dict[str, ToySentence] = {}
    while len(found) < count:
        sentence = _sentence(chance)
        if len(sentence.words) <= MAX_WORDS and sentence.text not in unlike:
            found.setdefault(sentence.text, sentence)
    return list(found.values())


def _sentence(chance: random.Random) -> ToySentence:
    tree = Tree("TOP", [_expand("S", chance)])
    first = tree.leaf_treeposition(0)
    tree[first] = tree[first][0].upper() + tree[first][1:]
    tags = [tag for _, tag in tree.pos()]
    space_after = [
        left not in NO_BLANK_AFTER and right not in NO_BLANK_BEFORE
        for left, right in zip(tags, tags[1:], strict=False)
    ]
    return ToySentence(tree, tree.leaves(), [*space_after, False])


def _expand(category: str, chance: random.Random) -> Tree:
    shown = SHOWN.get(category, category)
    if category in _WORDS:
        return Tree(shown, [chance.choice(_WORDS[category])])
    weights, choices = zip(*_RULES[category], strict=True)
    [children] = chance.choices(choices, weights)
    return Tree(shown, [_expand(child, chance) for child in children])


def _rules() -> dict[str, list[tuple[int, list[str]]]]:
    found: dict[str, list[tuple[int, list[str]]]] = {}
    for name, content in (line.split(": ", 1) for line in RULES.strip().splitlines()):
        for choice in content.split(" | "):
            weight, *children = choice.split()
            found.setdefault(name, []).append((int(weight), children))
    return found


def _words() -> Iterator[tuple[str, list[str]]]:
    for line in WORDS.strip().splitlines():
        name, *words = line.split()
        yield name, words


_RULES = _rules()
_WORDS = dict(_words())
