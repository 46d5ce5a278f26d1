"""The colours of the page, and of every figure in this book. A colour keeps its meaning.

The hues are Okabe and Ito's, which colour-blind readers can tell apart.

See common/events/README.md#the-film"""

PROMPT = "#0072b2"  # prompt tokens, and a scheduler that puts prompts first
DECODE = "#56b4e9"  # output tokens, and KV memory that is written
WASTE = "#f0b54a"  # padding, copies made again, memory that is reserved and empty
CACHED = "#009e73"  # found in a prefix cache, or shared
ACCEPTED = "#8fbf3f"  # draft tokens that were accepted
REJECTED = "#d55e00"  # draft tokens that were rejected
NGRAM = "#a6761d"  # draft tokens looked up in the text
DRAFT = "#5b4b9a"  # draft tokens of a draft model
PREEMPTED = "#cc79a7"  # preempted, computed again
OTHER = "#7f4f24"  # other systems
BASELINE = "#999999"  # without the chapter's idea
INK = "#222222"  # with the chapter's idea; lines and text
PAPER = "#ffffff"  # free, empty, not computed
