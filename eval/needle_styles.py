"""The wordings of published needle tests as one table: the needles, their haystack and the question."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NeedleStyle:
    """One needle test. Texts have the fields {key} and {value}; the {key} of a `question` may be a list of several keys.

    fact: the needle. intro, question: the words before and after the text, for one value and for several values; the
    answer follows the question. keys: cities | lwm | words | uuids | none. digits: of a number; None: as many as in the
    run's training; 0: the values are UUIDs. haystack: text (any) | noise (one repeated passage) | needles (more facts).
    pair: (N, R) where the source fixes it. one_key: all facts have the same key.
    string: one question asks for all R values, and a value counts if it occurs in what the model writes (the source's
    score). Otherwise a separate question asks for each value, and the model must continue with exactly the answer.
    """

    fact: str
    question: tuple[str, str]
    intro: tuple[str, str] = ("", "")
    keys: str = "cities"
    digits: int | None = None
    haystack: str = "text"
    pair: tuple[int, int] | None = None
    one_key: bool = False
    string: bool = True


NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def _ruler(value: str, keys: str = "words", **options: object) -> NeedleStyle:
    """RULER's sentences (arXiv 2404.06654, scripts/data/synthetic): `value` is number or uuid."""
    one = f"What is the special magic {value} for {{key}} mentioned in the provided text?"
    several = f"What are all the special magic {value}s for {{key}} mentioned in the provided text?"
    memorize = "hidden within the following text. Make sure to memorize it. I will quiz you about the"
    return NeedleStyle(
        fact=f"\nOne of the special magic {value}s for {{key}} is: {{value}}.",
        intro=(
            f"A special magic {value} is {memorize} {value} afterwards.\n",
            f"Some special magic {value}s are {memorize} {value}s afterwards.\n",
        ),
        question=(
            f"\n{one} The special magic {value} for {{key}} mentioned in the provided text is",
            f"\n{several} The special magic {value}s for {{key}} mentioned in the provided text are",
        ),
        keys=keys,
        digits=7 if value == "number" else 0,
        **options,
    )


_MAGIC = "\nThe magic number of {key} is"
_PASSKEY = "\nWhat is the pass key? The pass key is"
_LWM = "What {} for {{key}}? Don't give information outside the document. ASSISTANT:"
STYLES = {
    # our own style: the sentences of data/retrieval.py
    "magic": NeedleStyle(f"{_MAGIC} {{value}}.", (_MAGIC, _MAGIC), string=False),
    # LWM (arXiv 2402.08268), scripts/eval_needle_multi.py, which arXiv 2410.05258 follows
    "lwm": NeedleStyle(
        "\nThe special magic {key} number is: {value}\n",
        question=(" " + _LWM.format("is the special magic number"), " " + _LWM.format("are the special magic numbers")),
        intro=("You are a helpful assistant. USER: ",) * 2,
        keys="lwm",
        digits=7,
    ),
    # Landmark attention (Mohtashami & Jaggi, arXiv 2305.16300), appendix: passkey retrieval
    "passkey": NeedleStyle(
        "\nThe pass key is {value}. Remember it. {value} is the pass key.",
        question=(_PASSKEY, _PASSKEY),
        intro=(
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
            "I will quiz you about the important information there.\n",
        )
        * 2,
        keys="none",
        digits=5,
        haystack="noise",
        pair=(1, 1),
        string=False,
    ),
    # RULER's eight retrieval tasks with the settings of its synthetic.yaml. Where the haystack is made of needles, four
    # facts are ranked.
    "niah_single_1": _ruler("number", haystack="noise", pair=(1, 1)),
    "niah_single_2": _ruler("number", pair=(1, 1)),
    "niah_single_3": _ruler("uuid", pair=(1, 1)),
    "niah_multikey_1": _ruler("number", pair=(4, 1)),
    "niah_multikey_2": _ruler("number", haystack="needles", pair=(4, 1)),
    "niah_multikey_3": _ruler("uuid", keys="uuids", haystack="needles", pair=(4, 1)),
    "niah_multivalue": _ruler("number", pair=(4, 4), one_key=True),
    "niah_multiquery": _ruler("number", pair=(4, 4)),
}

# LWM's cities, each once. LWM's own list has Chicago four times, so one of its questions can have two right answers.
LWM_CITIES = (
    "Chicago, Yangon, Antananarivo, Colombo, Almaty, Sydney, Mexico City, Seattle, Lagos, Amsterdam, Belgrade, Cairo, "
    "Baghdad, Damascus, Kigali, Dakar, Sofia, Victoria, Tashkent, Mumbai, Barcelona, Amman, Toronto, Bratislava, "
    "Johannesburg, Thimphu, Bangkok, Santiago, San Francisco, Paris, Rabat, Copenhagen, Madrid, Ho Chi Minh City, "
    "Sarajevo, Delhi, Istanbul, Khartoum, Helsinki, Doha, Kuala Lumpur, Budapest, Shanghai, Moscow, Los Angeles, Oslo, "
    "Berlin, Bangalore, Tokyo, Melbourne, Port Louis, Lisbon, Nairobi, Kampala, Lima, Maputo, Vancouver, Dubai, Jakarta, "
    "Yerevan, Beirut, Athens, Bucharest, Brussels, Tunis, Astana, Seoul, Buenos Aires, Vienna"
).split(", ")

# RULER makes adjective-noun keys from a word list. These words are our own.
_ADJECTIVES = (
    "able amber ancient bitter bold brave brief bright broad calm careful clever cold crisp curious damp dark deep dry "
    "early easy faint famous fierce fresh gentle giant golden grand happy heavy hidden honest humble icy idle jolly keen "
    "large lively lonely loud lucky mellow mild narrow noble odd pale patient plain polite proud quick quiet rapid rare"
).split()
_NOUNS = (
    "acorn anchor arrow badge barn basket beacon bell bench blanket boat bottle branch bridge bucket button cabin candle "
    "canyon carpet castle chapel cliff cloud coin compass cottage cradle curtain desert drum eagle engine falcon feather "
    "fence ferry flute forest fountain garden glacier hammer harbor island jacket kettle ladder lantern meadow mirror"
).split()
WORDS = tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS)
