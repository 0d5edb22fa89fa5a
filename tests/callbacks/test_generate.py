from __future__ import annotations

import json
import logging
import os
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import EMA, CheckpointSaver
from callsheet.callbacks.generate import Generate
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.loggers.logger import Logger
from callsheet.testing import run_ranks

torch.set_num_threads(1)
VOCABULARY = 128
Table = tuple[int, list[list[str]]]


def llama(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 32, "max_position_embeddings": 64, "attention_dropout": 0.2, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **more, "bos_token_id": None, "eos_token_id": None, **changes}))


def data(batches: int = 3) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, VOCABULARY, (batches, 2, 12), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": each, "labels": each} for each in ids]


class Tables(Logger):
    """Records every table that is logged, on all ranks."""

    ranks = "all"

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.names: set[str] = set()

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        assert columns == ["prompt", "continuation"]
        self.names.add(name)
        self.tables.append((ctx.step, [list(row) for row in rows]))

    def state_dict(self) -> dict[str, Any]:
        return {"tables": json.dumps(self.tables)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tables = [(step, rows) for step, rows in json.loads(state["tables"])]


def trainer(folder: Path | str, *callbacks: Callback, model: Any = None, checking: bool = True, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_duration": "2ep", "run_name": "run", "log_interval": "2ba", "seed": 5}
    return Trainer(
        llama() if model is None else model,
        None,
        data(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        callbacks=CallbackManager(callbacks, checking=checking),
        runs_folder=folder,
        device="cpu",
        **(defaults | options),
    )


def generated(folder: Path, generate: Generate, *callbacks: Callback, **options: Any) -> list[Table]:
    tables = Tables()
    with trainer(folder, generate, tables, *callbacks, **options) as trained:
        trained.fit()
    assert tables.names <= {generate.name or "generations"}
    return tables.tables


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in model.state_dict().items()
    }


@torch.no_grad()
def greedy_tokens(model: Any, ids: list[int], count: int) -> list[int]:
    """Return the most likely next tokens, computed with the model's forward and without a cache."""
    written: list[int] = []
    for _ in range(count):
        written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
    return written


class GreedyContinuations(Callback):
    """Computes the most likely bytes at each step's end, with a second model that has the same weights."""

    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts
        self.expected: dict[int, list[list[str]]] = {}

    def on_train_step_end(self, ctx: Context) -> None:
        state = random.getstate(), torch.get_rng_state()
        other = llama(1).eval()
        other.load_state_dict(ctx.model.state_dict())
        random.setstate(state[0])
        torch.set_rng_state(state[1])
        self.expected[ctx.step] = [
            [prompt, bytes(greedy_tokens(other, list(prompt.encode()), 6)).decode(errors="replace")] for prompt in self.prompts
        ]


def test_greedy_decoding_uses_the_current_weights(tmp_path: Path) -> None:
    prompts = ["def ", "a", "import ", "b"]  # prompts of three lengths
    copies = GreedyContinuations(*prompts)
    generate = Generate(prompts=prompts, interval="2ba", do_sample=False, max_new_tokens=6)
    tables = generated(tmp_path, generate, copies, max_duration="5ba")
    assert [step for step, _ in tables] == [2, 4, 5]
    assert tables == [(step, copies.expected[step]) for step in (2, 4, 5)]
    assert tables[0] != tables[2]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [("1ep", [3, 6]), (2, [2, 4, 6]), ("4ba", [4, 6]), ("0.5dur", [3, 6]), ("7ep", [6]), ("1iter", [6])],
)
def test_generates_at_intervals_and_at_the_end_once_per_step(tmp_path: Path, interval: str | int, expected: list[int]) -> None:
    generate = Generate(prompts=["a"], interval=interval, max_new_tokens=2)
    assert [step for step, _ in generated(tmp_path, generate)] == expected


class MakesWeightsNaN(Callback):
    phase = "change"

    @torch.no_grad()
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            next(iter(ctx.model.parameters())).fill_(float("nan"))


@pytest.mark.parametrize("sampled", [True, False])
def test_a_model_whose_outputs_are_not_finite_generates_nothing_and_training_continues(
    sampled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate = Generate(prompts=["a"], interval="1ba", max_new_tokens=2, do_sample=sampled)
    assert [step for step, _ in generated(tmp_path, generate, MakesWeightsNaN())] == [1]
    warnings = [record.getMessage() for record in caplog.records if "generates nothing" in record.getMessage()]
    assert warnings == ["Generate generates nothing at step 2: the model's outputs are NaN or infinite (this is said once)"]


def test_the_table_has_the_name_of_the_callback(tmp_path: Path) -> None:
    generate = Generate(prompts=["a"], max_new_tokens=2)
    generate.name = "poems"
    assert generated(tmp_path, generate)


def test_the_batch_size_does_not_change_the_text(tmp_path: Path) -> None:
    prompts = ["ab", "c", "de", "fg", "h"]
    alone, together = (
        generated(tmp_path / str(size), Generate(prompts=prompts, do_sample=False, max_new_tokens=5, batch_size=size))
        for size in (1, 2)
    )
    assert alone == together
    assert [row[0] for row in alone[0][1]] == prompts


class RecordsModesAndRandomStates(Callback):
    """Records what generating must not change: modes, gradients, random states and `use_cache`."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_train_step_end(self, ctx: Context) -> None:
        modes = [module.training for module in ctx.model.modules()]
        gradients = [None if weight.grad is None else weight.grad.sum().item() for weight in ctx.model.parameters()]
        self.seen.append((modes, gradients, random.getstate(), torch.get_rng_state().tolist(), ctx.model.config.use_cache))


class Freezes(Callback):
    """Leaves one module in evaluation mode while the rest trains."""

    phase = "change"

    def on_train_start(self, ctx: Context) -> None:
        ctx.model.model.layers[0].eval()


def test_training_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    ends = []
    for generating in (False, True):
        before, after = RecordsModesAndRandomStates(), RecordsModesAndRandomStates()
        after.name = "after"
        middle = [Generate(prompts=["ab", "c"], interval="1ba", max_new_tokens=4, at_evaluation=True)] if generating else []
        with trainer(tmp_path / str(generating), Freezes(), before, *middle, after, eval_dataloader=data(1)) as trained:
            trained.fit()
        assert before.seen == after.seen
        assert not all(before.seen[0][0])
        assert any(before.seen[0][0])
        ends.append((weights_of(trained.model), before.seen))
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])


def test_sampling_depends_only_on_the_weights_and_the_seed(tmp_path: Path) -> None:
    def at(folder: str, seed: int, **options: Any) -> list[Table]:
        generate = Generate(prompts=["ab"], interval="1ba", max_new_tokens=8, seed=seed)
        return generated(tmp_path / folder, generate, **options)

    first = at("first", 0)
    assert at("again", 0) == first
    assert at("other", 1) != first
    greedy = generated(tmp_path / "greedy", Generate(prompts=["ab"], interval="1ba", max_new_tokens=8, do_sample=False))
    assert greedy != first
    cold = Generate(prompts=["ab"], interval="1ba", max_new_tokens=8, temperature=1e-4)
    assert generated(tmp_path / "cold", cold) == greedy


def test_options_are_passed_to_generate(tmp_path: Path) -> None:
    narrow = Generate(prompts=["ab"], max_new_tokens=8, options={"top_k": 1})
    assert generated(tmp_path / "k", narrow) == generated(
        tmp_path / "greedy", Generate(prompts=["ab"], max_new_tokens=8, do_sample=False)
    )


@pytest.mark.test_all
@pytest.mark.parametrize("interval", ["5sp", "2ba", "1ep", "0.4dur"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, interval: str) -> None:
    def made() -> Generate:
        return Generate(prompts=["ab"], interval=interval, max_new_tokens=4)

    saver = CheckpointSaver(keep=None, save_interval="1ba", save_at_end=False)
    whole = generated(tmp_path, made(), saver, log_interval="3ba")
    assert len(whole) > 1
    found = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert len(found) > 3
    for each in found:
        again = generated(tmp_path, made(), run_name=f"from{each.step}", resume=each.path, log_interval="3ba")
        assert again == whole, each.step  # the checkpoint contains the earlier tables


def test_a_new_run_starts_from_scratch(tmp_path: Path) -> None:
    generate = Generate(prompts=["a"], max_new_tokens=2)
    first = generated(tmp_path, generate)
    assert generated(tmp_path, generate, run_name="other") == first


def test_generates_after_evaluations_with_the_evaluated_weights(tmp_path: Path) -> None:
    tables, plain = (
        generated(
            tmp_path / str(averaged),
            Generate(prompts=["abcd"], interval=None, at_evaluation=True, do_sample=False, max_new_tokens=12),
            *([EMA(decay=0.999)] if averaged else []),
            eval_dataloader=data(1),
            eval_interval="2ba",
        )
        for averaged in (True, False)
    )
    assert [step for step, _ in tables] == [step for step, _ in plain] == [2, 4, 6]
    assert tables[0][1] == tables[2][1]  # the average has hardly changed
    assert plain[0][1] != plain[2][1]


def test_a_manual_evaluation_writes_nothing(tmp_path: Path) -> None:
    tables = Tables()
    generate = Generate(prompts=["a"], interval=None, at_evaluation=True, max_new_tokens=2)
    with trainer(tmp_path, generate, tables, eval_dataloader=data(1), eval_interval=None) as trained:
        trained.evaluate()
        trained.fit()
        trained.evaluate()
    assert not tables.tables


class WordTokenizer:
    """A tokenizer with a vocabulary of three words."""

    words = ("one", "two", "three")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in ids)


def made_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(WordTokenizer.words)}, "one"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


@pytest.mark.parametrize("kind", ["own", "huggingface", "folder", "ids", "ids and tokenizer"])
def test_each_kind_of_tokenizer_is_supported(tmp_path: Path, kind: str) -> None:
    tokenizer: Any = {"own": WordTokenizer(), "ids": None, "ids and tokenizer": WordTokenizer()}.get(kind, made_tokenizer())
    if kind == "folder":
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        tokenizer = str(tmp_path / "tokenizer")
    generate = Generate(
        prompts=[[1, 0]] if kind.startswith("ids") else ["two one"],
        tokenizer=tokenizer,
        max_new_tokens=5,
        options={"bad_words_ids": [[i] for i in range(3, VOCABULARY)]},
    )
    ((_, ((prompt, continuation),)), _) = generated(tmp_path, generate)
    words = ("0", "1", "2") if kind == "ids" else WordTokenizer.words
    assert prompt == f"{words[1]} {words[0]}"
    assert len(continuation.split()) == 5
    assert set(continuation.split()) <= set(words)


def test_a_continuation_ends_at_the_end_of_text_token(tmp_path: Path) -> None:
    """The other prompts continue; padding after the end is not part of the text."""
    free = generated(tmp_path / "free", Generate(prompts=[[7, 8], [9, 3]], do_sample=False, max_new_tokens=8))[-1][1]
    (_, first), (_, second) = free
    end = next(token for token in first.split() if token not in second.split())
    expected = [first.split(), second.split()]
    expected[0] = expected[0][: expected[0].index(end)]
    ended = Generate(prompts=[[7, 8], [9, 3]], do_sample=False, max_new_tokens=8, options={"eos_token_id": int(end)})
    rows = generated(tmp_path / "ended", ended)[-1][1]
    assert [row[1].split() for row in rows] == expected


class Plain(nn.Module):
    """A user's language model with its own `generate`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))  # type: ignore[no-any-return]

    def generate(self, ids: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
        assert not self.training
        assert temperature == 0.5
        for _ in range(max_new_tokens):
            chances = (self(ids[:, -1:])[:, -1] / temperature).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
        return ids


def plain_trainer(folder: Path, model: nn.Module, *callbacks: Callback) -> Trainer:
    return Trainer(
        model,
        lambda outputs, targets: nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten()),
        [(batch["input_ids"], batch["labels"]) for batch in data()],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        run_name="run",
        device="cpu",
        seed=1,
    )


def test_a_custom_model_with_a_generate_method(tmp_path: Path) -> None:
    tables = Tables()
    with plain_trainer(tmp_path, Plain(), Generate(prompts=[[1], [2, 3]], max_new_tokens=4, temperature=0.5), tables) as trained:
        trained.fit()
    ((_, rows),) = tables.tables
    assert [len(row[1].split()) for row in rows] == [4, 4]


def test_a_model_that_cannot_generate_is_rejected_before_any_step(tmp_path: Path) -> None:
    with plain_trainer(tmp_path, nn.Embedding(VOCABULARY, VOCABULARY), Generate(prompts=["a"])) as trained:
        with pytest.raises(ConfigError, match=r"Embedding has no generate\(\)"):
            trained.fit()
    assert trained.state.timestamp.batch == 0


def test_without_prompts_it_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tables = Tables()
    with caplog.at_level(logging.WARNING, "callsheet"):
        with plain_trainer(tmp_path, nn.Embedding(VOCABULARY, VOCABULARY), Generate(), tables) as trained:
            trained.fit()
            trained.fit("2ep")
    assert [message for message in caplog.messages if "no prompts" in message] == [
        "Generate has no prompts and generates nothing; give it prompts="
    ]
    assert not tables.tables


class Preempts(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_preempted_run_does_not_generate(tmp_path: Path) -> None:
    generate = Generate(prompts=["a"], interval="2ba", max_new_tokens=2)
    assert [step for step, _ in generated(tmp_path, generate, Preempts(), checking=False)] == [2]


def test_after_a_failure_the_model_is_in_training_mode(tmp_path: Path) -> None:
    generate = Generate(prompts=["a"], interval="1ba", options={"no_such_option": 1})
    with trainer(tmp_path, generate) as trained, pytest.raises(ValueError, match="no_such_option"):
        trained.fit()
    assert trained.model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "text"}, "give a list"),
        ({"interval": None}, "would never generate anything"),
        ({"interval": "0ba"}, "more than 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"temperature": 0.0}, "do_sample=False takes the likeliest"),
    ],
)
def test_rejects_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Generate(**options)


@pytest.mark.parametrize(("prompt", "message"), [("", "the prompt ''"), ("\ud83d", r"prompts\[1\]: half of a surrogate pair")])
def test_an_unusable_prompt_is_rejected_before_any_step(prompt: str, message: str, tmp_path: Path) -> None:
    with trainer(tmp_path, Generate(prompts=["a", prompt])) as trained, pytest.raises(ConfigError, match=message):
        trained.fit()
    assert trained.state.timestamp.batch == 0


def on_ranks(folder: str, parallel: str, generates: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    tables = Tables()
    generate = [Generate(prompts=["ab", "c", "de"], interval="1ba", max_new_tokens=6, **options)] if generates else []
    modes = RecordsModesAndRandomStates()
    shards: list[bool] = []
    with trainer(folder, *generate, tables, modes, parallel=parallel, checking=False, max_duration="4ba") as trained:
        trained.callbacks.register(
            "on_train_step_end",
            lambda ctx: shards.extend(isinstance(parameter, DTensor) for parameter in ctx.model.parameters()),
        )
        trained.fit()
        weights = {name: tensor.tolist() for name, tensor in weights_of(trained.model).items()}
    return {"tables": tables.tables, "weights": weights, "seen": [seen[0] for seen in modes.seen], "shards": set(shards)}


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"options": {"eos_token_id": list(range(0, 128, 3))}}, marks=pytest.mark.slow)],
    ids=["whole", "ending"],
)
def test_two_ranks_log_one_table_and_training_is_not_changed(parallel: str, options: dict[str, Any], tmp_path: Path) -> None:
    bare = run_ranks(on_ranks, 2, str(tmp_path / "bare"), parallel, False, options)
    first, second = run_ranks(on_ranks, 2, str(tmp_path / "run"), parallel, True, options)
    assert first["weights"] == second["weights"] == bare[0]["weights"]
    assert first["seen"] == second["seen"] == bare[0]["seen"]
    assert first["shards"] == second["shards"] == {parallel == "fsdp"}  # sharded as before
    assert [step for step, _ in first["tables"]] == [1, 2, 3, 4]
    assert not second["tables"]


@pytest.mark.slow
def test_sharded_and_unsharded_models_generate_the_same(tmp_path: Path) -> None:
    ends = [run_ranks(on_ranks, 2, str(tmp_path / kind), kind, True, {"do_sample": False})[0] for kind in ("ddp", "fsdp")]
    assert ends[0]["tables"] == ends[1]["tables"]
