"""The scripts of the films: four to six requests, about twenty steps. `film_facts.py` reads the
facts that each film shows, `films.py` their descriptions."""

from __future__ import annotations

from grammars import Choice, Json
from workshop.watch.workloads import DEFAULT, Script, Visit

EVERYTHING = DEFAULT
SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_blocks": 40,
    "prefix_cache": None,
}

_PRIME = "def is_prime(n):\n    for"
_MEAN = "def mean(values):\n    return"
_LINES = "def read_lines(path):\n    with open(path) as"
_MAIN = "import os\nimport sys\n\n\ndef main():"
_IMPORTS = "import os\nimport sys\nimport re\nimport"
_QUEUE = "class Queue:"
_RUN_AS = "if __name__ =="
_LOOP = "for i in range(10):"
_STACK = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n"

# Six requests of different lengths, three slots, KV memory for all.
CONTINUOUS = Script(
    (
        Visit("a", 0, _RUN_AS, 20),
        Visit("b", 0, _PRIME, 14),
        Visit("c", 0, _LINES, 6),
        Visit("d", 1, _MEAN, 10),
        Visit("e", 2, _MAIN, 8),
        Visit("f", 3, _LOOP, 5),
    ),
    SMALL
    | {
        "max_num_seqs": 3,
        "chunked_prefill": False,
    },
)
STATIC = Script(CONTINUOUS.visits, CONTINUOUS.config, is_static=True)

# Chapter 2's scheduler: an admitted request gets all the blocks that it can ever need.
TABLES = Script(
    (
        Visit("a", 0, _PRIME, 20),
        Visit("b", 1, _QUEUE, 8),
        Visit("c", 4, _RUN_AS, 6),
        Visit("d", 12, _MEAN, 8),
    ),
    SMALL
    | {
        "max_num_batched_tokens": 16,
        "num_blocks": 15,
        "scheduler": "fcfs",
        "chunked_prefill": False,
    },
)

# Three requests with a common prefix (a, b, e), and two between them that need the memory.
PREFIXES = Script(
    (
        Visit("a", 0, f"{_STACK}    def pop(self):", 8),
        Visit("b", 4, f"{_STACK}    def size(self):", 6),
        Visit("c", 8, _PRIME, 14),
        Visit("d", 12, _MAIN, 14),
        Visit("e", 22, f"{_STACK}    def clear(self):", 8),
    ),
    SMALL
    | {
        "num_blocks": 20,
        "prefix_cache": "hash",
        "watermark": 0,
    },
)

# Fifteen blocks for four growing requests.
SCARCE = Script(
    (
        Visit("a", 0, _PRIME, 20),
        Visit("b", 0, _MEAN, 13),
        Visit("c", 2, _MAIN, 9),
        Visit("d", 3, _LINES, 12),
    ),
    SMALL
    | {
        "num_blocks": 16,
        "watermark": 0,
    },
)

# Texts that repeat themselves, more or less.
PLAIN = Script(
    (
        Visit("a", 0, _IMPORTS, 16),
        Visit("b", 1, _MAIN, 18),
        Visit("c", 2, f"{_STACK}    def pop(self):\n        return", 20),
        Visit("d", 3, _LINES, 24),
    ),
    SMALL
    | {
        "max_num_batched_tokens": 40,
        "num_blocks": 49,
    },
)
GUESSING = PLAIN.but(speculative={"method": "ngram", "num_spec_tokens": 3, "adaptive": False})

# Two decoding requests, and a long prompt, a class with ten getters, that arrives in between.
_NAMES = "width height depth colour title parent cursor menu font border"
_WINDOW = "class Window:\n" + "".join(
    f"    def get_{name}(self):\n        return self._{name}\n\n" for name in _NAMES.split()
)
WHOLE = Script(
    (
        Visit("a", 0, _PRIME, 20),
        Visit("b", 1, _QUEUE, 20),
        Visit("c", 5, f"{_WINDOW}    def get_size(self):", 8),
        Visit("d", 7, _RUN_AS, 8),
    ),
    SMALL
    | {
        "block_size": 8,
        "num_blocks": 33,
        "max_num_batched_tokens": 160,
        "chunked_prefill": False,
    },
)
PIECES = WHOLE.but(chunked_prefill=32)

# Three slots, and memory for one adapter. The second request needs another adapter.
_AREA = 'def area(width, height):\n    """Return the area of a rectangle."""'
ADAPTED = Script(
    (
        Visit("a", 0, _AREA, 10),
        Visit("b", 1, _AREA, 16, adapter="tests"),
        Visit("c", 1, _LOOP, 5),
        Visit("d", 2, _MEAN, 8, adapter="half"),
        Visit("e", 3, _QUEUE, 12),
        Visit("f", 7, _AREA, 6, adapter="tests"),
    ),
    SMALL
    | {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 48,
        "prefix_cache": "hash",
        "max_loras": 1,
    },
    adapters={"tests": 1.0, "half": 0.5},
)

# Layers in two groups, one with a window: `c` finds the blocks of `a`, `e` comes too late.
WINDOWED = Script(
    (
        Visit("a", 0, f"{_STACK}    def pop(self):", 10),
        Visit("b", 3, _PRIME, 14),
        Visit("c", 6, f"{_STACK}    def size(self):", 8),
        Visit("d", 8, _MAIN, 10),
        Visit("e", 18, f"{_STACK}    def clear(self):", 6),
    ),
    SMALL
    | {
        "prefix_cache": "hash",
        "watermark": 0,
        "chunked_prefill": 8,
    },
    window=10,
)

# A function's signature, in the model's own style and as JSON; and a choice of three words.
_EXAMPLE = """def add(first, second):
    return first + second

signature = {"name": "add", "returns": "int"}


"""
_SIGNATURE = Json(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z_]{2,12}$"},
            "returns": {"enum": ["int", "str", "bool", None]},
        },
        "required": ["name", "returns"],
        "additionalProperties": False,
    },
    max_whitespace=0,
)
_EVEN = f"{_EXAMPLE}def is_even(number):\n    return number % 2 == 0\n\nsignature = "
_JOIN = f"{_EXAMPLE}def join(words, sep):\n    return sep.join(words)\n\nsignature = "
CONSTRAINED = Script(
    (
        Visit("a", 0, _EVEN, 20),
        Visit("b", 1, _EVEN, 30, grammar=_SIGNATURE),
        Visit("c", 2, _RUN_AS, 12),
        Visit("d", 2, 'answer = "', 6, grammar=Choice(["yes", "no", "none"])),
        Visit("e", 3, _JOIN, 30, grammar=_SIGNATURE),
    ),
    SMALL
    | {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 128,
        "block_size": 8,
        "num_blocks": 48,
    },
    compile_steps=3,
)
