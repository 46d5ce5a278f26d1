"""Train the adapter that ships with the repository: it writes tests where the model writes bodies.

    python -m workshop.training.train_adapter            minutes on one core

Text for it is in the standard library, too: its own tests, which the model has never seen, compare
calls with their results, three thousand times. A document is

    def mean(values):                                    the head of a function of the library:
        '''Return the arithmetic mean of the values.'''   the prompt, on which there is no loss


    def test_mean():                                     its name, in
        assert mean([1, 2, 3]) == 2                      calls from the library's tests, of a
        assert mean([]) is None                          function with as many parameters
    <|endoftext|>

The assertions are therefore no more true than the model's other text: the form is learnt, and the
name. The base's weights stay unchanged; A and B are trained in float32, shipped in bfloat16.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import random
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm

from workshop.training.tiny_data import END_OF_TEXT, HELD_OUT, corpus
from workshop.training.tiny_eval import CHECKPOINTS, load

BASE, OUT = CHECKPOINTS / "tiny", CHECKPOINTS / "tiny-tests"
CARD = Path(__file__).with_name("adapter_card.txt")
_MAX_CHARS = 60  # for a head's line, a docstring, a line of a test
_IGNORED = -100  # the label that `cross_entropy` leaves out


@dataclass(frozen=True, slots=True)
class AdapterTraining:
    """The configuration of one run."""

    num_steps: int = 400
    num_documents: int = 6  # of a step
    rank: int = 8
    alpha: int = 16
    lr: float = 4e-3  # falls linearly to zero
    seed: int = 0


class Head(NamedTuple):
    name: str
    text: str  # as far as the docstring
    num_parameters: int


class Case(NamedTuple):
    arguments: str
    num_arguments: int
    wanted: str


# -- documents


def heads(texts: Iterable[str]) -> Iterator[Head]:
    """Yield functions and methods with parameters and a docstring, whose first line is kept."""
    for tree in _parsed(texts):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            doc, given = ast.get_docstring(node), node.args
            names = [a.arg for a in given.args if a.arg not in ("self", "cls")]
            if not doc or not names or given.vararg or given.kwarg or given.kwonlyargs:
                continue
            line = f"def {node.name}({', '.join(names)}):"
            doc = f'    """{doc.splitlines()[0]}"""'
            if max(len(line), len(doc)) <= _MAX_CHARS and "\\" not in doc:
                yield Head(node.name, f"{line}\n{doc}", len(names))


def cases(texts: Iterable[str]) -> Iterator[Case]:
    """Yield calls with literals and their results: `assertEqual(name(1, "a"), True)`."""
    for tree in _parsed(texts):
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="assertEqual"),
                    args=[ast.Call(args=[_, *_] as arguments, keywords=[]), wanted],
                ) if all(map(_is_literal, [*arguments, wanted])):
                    told = ", ".join(map(ast.unparse, arguments))
                    found = Case(told, len(arguments), ast.unparse(wanted))
                    if len(told) + len(found.wanted) <= _MAX_CHARS - 20:
                        yield found


def _parsed(texts: Iterable[str]) -> Iterator[ast.Module]:
    for text in texts:
        try:
            yield ast.parse(text)
        except SyntaxError:  # invalid on purpose, or Python 2
            continue


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def library_tests(stdlib: Path | None = None) -> list[str]:
    """Read the source of the library's own tests. Raises `FileNotFoundError` if there are none."""
    folder = (stdlib or Path(sysconfig.get_path("stdlib"))) / "test"
    paths = sorted(folder.rglob("test_*.py"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no tests: this Python came without them")
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def document(head: Head, those: Sequence[Case], rng: random.Random) -> str:
    """Return the text that follows the head."""
    lines = [f"\n\n\ndef test_{head.name}():"]
    for case in rng.sample(those, min(len(those), rng.randint(2, 4))):
        operator = "is" if case.wanted in ("None", "True", "False") else "=="
        lines.append(f"    assert {head.name}({case.arguments}) {operator} {case.wanted}")
    return "\n".join(lines) + "\n"


class Documents:
    """The documents of all heads: [prompts, completions], drawn again in each step."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str], tests: Iterable[str]) -> None:
        self.tokenizer, self.by_number = tokenizer, {}
        for case in sorted(set(cases(tests))):
            self.by_number.setdefault(case.num_arguments, []).append(case)
        unique = {head.text: head for head in heads(texts)}
        self.heads = [
            h for h in unique.values() if len(self.by_number.get(h.num_parameters, "")) > 9
        ]
        self.end = tokenizer.token_to_id(END_OF_TEXT)

    def batch(
        self, chosen: Sequence[Head], rng: random.Random
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and the label after each, [num_documents, longest]."""
        rows = []
        for head in chosen:
            prompt = self.tokenizer.encode(head.text).ids  # as it is served
            text = document(head, self.by_number[head.num_parameters], rng)
            rows.append((len(prompt), [*prompt, *self.tokenizer.encode(text).ids, self.end]))
        longest = max(len(ids) for _, ids in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        labels = torch.full_like(ids, _IGNORED)
        for i, (num_prompt, row) in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, num_prompt : len(row)] = ids[i, num_prompt : len(row)]
        return ids[:, :-1], labels[:, 1:]


# -- training


def train(config: AdapterTraining, documents: Documents, held_out: Documents, out: Path) -> dict:
    """Write the adapter, its record and its card. Returns the record."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(config.seed)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(load(BASE), lora)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=0.0)
    with model.disable_adapter():
        before = evaluate(model, held_out, config.seed)
    curve, num_tokens, started = [], 0, time.process_time()
    window: list[float] = []
    for step in tqdm(range(config.num_steps), unit="step"):
        rng = random.Random(f"{config.seed} {step}")
        optimizer.param_groups[0]["lr"] = config.lr * (1 - step / config.num_steps)
        chosen = rng.sample(documents.heads, config.num_documents)
        ids, labels = documents.batch(chosen, rng)
        loss = _loss(model, ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        num_tokens += int((labels != _IGNORED).sum())
        window.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == config.num_steps:
            curve.append(
                {
                    "step": step + 1,
                    "train_loss": float(np.mean(window)),
                    "cpu_seconds": time.process_time() - started,
                }
            )
            window = []
    with torch.no_grad():  # as shipped
        for weight in weights:
            weight.copy_(weight.bfloat16())
    after = evaluate(model, held_out, config.seed)
    for weight in weights:
        weight.data = weight.data.bfloat16()
    model.peft_config["default"].base_model_name_or_path = "tiny"
    model.save_pretrained(str(out), save_embedding_layers=False)  # needs no config from elsewhere
    record = {
        "command": "python -m workshop.training.train_adapter",
        "config": asdict(config),
        "parameters": sum(weight.numel() for weight in weights),
        "corpus": {
            "python": platform.python_version(),
            "heads": len(documents.heads),
            "cases": sum(map(len, documents.by_number.values())),
            "tokens": num_tokens,
        },
        "torch": torch.__version__,
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads()},
        "held_out": {"heads": len(held_out.heads), "base": before, "adapter": after},
        "curve": curve,
    }
    (out / "training_record.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "README.md").write_text(card(record))
    return record


def _loss(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)


@torch.no_grad()
def evaluate(model: torch.nn.Module, documents: Documents, seed: int) -> dict[str, float]:
    """Return nats a token of the tests, and the share of heads that are most likely followed by a
    test of that name."""
    model.eval()
    ids, labels = documents.batch(documents.heads, random.Random(seed))
    found = {"nats_per_token": _loss(model, ids, labels).item()}
    num_tests = 0
    for head in documents.heads:
        row = torch.tensor([documents.tokenizer.encode(head.text).ids])
        text = f"\n\n\ndef test_{head.name}():\n    assert {head.name}("
        wanted = documents.tokenizer.encode(text).ids[:-1]  # the last may merge with more text
        with_text = torch.cat([row, torch.tensor([wanted])], dim=1)
        likeliest = model(input_ids=with_text).logits[0].argmax(-1)
        num_tests += likeliest[row.shape[1] - 1 : -1].tolist() == wanted
    model.train()
    return found | {"share_of_tests": num_tests / len(documents.heads)}


def card(record: dict) -> str:
    config, corpus_of, held_out = record["config"], record["corpus"], record["held_out"]
    return CARD.read_text(encoding="utf-8").format(
        **{**record, **config, **corpus_of},
        num_held_out=held_out["heads"],
        base=held_out["base"],
        adapter=held_out["adapter"],
        minutes=record["curve"][-1]["cpu_seconds"] / 60,
        files=", ".join(f"`{path}`" for path in HELD_OUT),
    )


def both_documents() -> tuple[Documents, Documents]:
    """Return documents to train on, and held-out ones: of heads in the base's held-out files."""
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    texts, held_out = corpus()
    tests = library_tests()
    found, left = (Documents(tokenizer, own.values(), tests) for own in (texts, held_out))
    names = {head.name for head in left.heads}
    found.heads = [head for head in found.heads if head.name not in names]
    return found, left


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=AdapterTraining().num_steps)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    record = train(AdapterTraining(arguments.steps), *both_documents(), arguments.out)
    print(json.dumps(record["held_out"], indent=1))


if __name__ == "__main__":
    main()
