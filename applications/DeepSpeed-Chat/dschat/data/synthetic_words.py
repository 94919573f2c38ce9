# SPDX-License-Identifier: Apache-2.0
"""Words and sentence templates of the synthetic review corpus (see `dschat.data.synthetic`).

Every word here is short and frequent, so that the corpus tokenizer gives nearly all of them one token. A template's
`{a}` takes any adjective (neutral, complaint or praise), `{n}` a neutral noun, `{p}` a person; `{thing}` and `{place}`
in posts take the product and the place of use. Posts hold no full stop: the only ones a model reads are the
response's, and the gold score counts those.
"""

COMPLAINTS = (
    "slow noisy weak dull bitter broken cheap heavy loose rough sticky dirty "
    "sour thin clumsy faulty ugly messy stiff leaky shaky dim bland rusty"
).split()

PRAISES = (
    "fast quiet strong bright sweet solid clever light firm smooth clean tidy "
    "fresh rich handy sturdy lovely neat warm cosy steady crisp tasty sharp"
).split()

NEUTRALS = (
    "plain round square small large blue green grey brown black white red "
    "flat tall short wide narrow long open closed folded boxed local common "
    "usual basic normal standard new old"
).split()

NOUNS = (
    "price colour handle box shape cover label base size design "
    "lid front back side top button cable manual package finish"
).split()

PEOPLE = "wife friend sister brother boss son uncle aunt".split()

# Response sentences. Each holds one to three adjectives in at most eight words and marks.
SENTENCES = (
    "It was {a}, {a} and {a}.",
    "The {a} {n} was {a} and {a}.",
    "The {a} {n} felt {a} and {a}.",
    "It looked {a}, {a} and {a}.",
    "The {n} was {a} and {a}.",
    "The {a} {n} looked {a}.",
    "It felt {a} and {a}.",
    "My {p} found it {a} and {a}.",
    "The {n} seemed {a}.",
    "My {p} got the {a} {n}.",
    "I found the {n} {a}.",
)

# One subreddit -> the things its posts ask about.
SUBREDDITS = {
    "coffee": ("kettle", "grinder", "mug"),
    "camping": ("tent", "stove", "lamp"),
    "cooking": ("pan", "knife", "pot"),
    "running": ("shoe", "watch", "jacket"),
    "travel": ("bag", "hotel", "pillow"),
    "music": ("guitar", "speaker", "radio"),
    "cycling": ("bike", "helmet", "pump"),
    "gaming": ("chair", "mouse", "screen"),
    "books": ("novel", "reader", "shelf"),
    "garden": ("hose", "shovel", "bench"),
    "pets": ("collar", "bowl", "bed"),
    "photos": ("camera", "lens", "printer"),
}

PLACES = "cabin office car kitchen garage school farm club".split()

OPENERS = (
    "I saw a {thing} in a shop near the {place}",
    "My {p} wants a {thing}",
    "We need a {thing} for the {place}",
    "I may buy a {thing} this week",
    "My {p} gave me a {thing}",
    "There is a {thing} on sale near the {place}",
    "I lost the {thing} of my {p}",
    "I want a {thing} for my {p}",
)

DETAILS = (
    "I would use it at the {place} with my {p}",
    "It is for my {p} and me",
    "My {p} has one at the {place}",
    "We would keep it in the {place}",
    "I will share it with my {p}",
    "My {p} and I have to choose one this week",
)

REQUESTS = (
    "Please write a short review with the bad and then the good",
    "Can you write a short review with the bad first",
    "Tell me the bad and then the good in a short review",
    "Please write a review with the bad first",
)

TITLES = ("Need a review of a {thing}", "Is this {thing} any good?", "Help me choose a {thing}")
