"""Stand-in data for the public scripts, in the formats that they read: `python public_scripts_data.py RECIPE FOLDER`.

Images and texts are random but have a pattern that a model can learn. Models are tiny and have random weights.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RANDOM = np.random.default_rng(20)
_TEXT = "the a red blue small old quick lazy cat dog bird fish sees likes finds follows under over near river house tree"
WORDS = _TEXT.split()


def sentences(count: int, words: int = 8) -> list[str]:
    """Return random sentences of a small vocabulary."""
    return [" ".join(RANDOM.choice(WORDS, words)) + " ." for _ in range(count)]


def _digits(count: int, size: int, channels: int = 1) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return images of noise with a bright square, whose position is the label."""
    labels = RANDOM.integers(0, 10, count)
    images = RANDOM.integers(0, 100, (count, channels, size, size))
    edge = size // 5
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 5)
        image[:, row * 2 * edge : (row * 2 + 1) * edge, column * edge : (column + 1) * edge] += 150
    return images.astype(np.uint8), labels.astype(np.uint8)


def mnist(folder: Path) -> None:
    """Write 1,280 and 256 images in MNIST's format."""
    for prefix, count in (("train", 1280), ("t10k", 256)):
        images, labels = _digits(count, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def mnist_of_lightning(folder: Path) -> None:
    """Write as many images as MNIST has, in the files of Lightning's demos."""
    import torch

    for name, count in (("training", 60_000), ("test", 10_000)):
        images, labels = _digits(count, 28)
        torch.save((torch.from_numpy(images[:, 0]), torch.from_numpy(labels.astype(np.int64))), folder / f"{name}.pt")


def image_folders(folder: Path) -> None:
    """Write the folders `train` and `val`, with a folder of images for each of five classes."""
    from PIL import Image

    for part, count in (("train", 48), ("val", 16)):
        images, labels = _digits(count, 80, 3)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = folder / part / f"class_{label % 5}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(place / f"{number}.png")


def pets(folder: Path) -> None:
    """Write images whose names have the label, as in the Oxford pets data."""
    from PIL import Image

    images, labels = _digits(80, 64, 3)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / f"breed_{'abcd'[label % 4]}_{number}.jpg")


def bsds300(folder: Path) -> None:
    """Write the folders `train` and `test` with images in BSDS300's size."""
    from PIL import Image

    for part, count in (("train", 24), ("test", 4)):
        (folder / part).mkdir()
        images, _ = _digits(count, 321, 3)
        for number, image in enumerate(images):
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / part / f"{number}.jpg")


def voc2012(folder: Path) -> None:
    """Write images in the folders of Pascal VOC 2012, with masks in which a bright square is class 1."""
    from PIL import Image

    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for part, count in (("train", 12), ("val", 2)):
        images, _ = _digits(count, 240, 3)
        names = [f"{part}_{number}" for number in range(count)]
        for name, image in zip(names, images, strict=True):
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / "JPEGImages" / f"{name}.jpg")
            mask = (image.min(axis=0) >= 100).astype(np.uint8)
            Image.fromarray(mask).save(folder / "SegmentationClass" / f"{name}.png")
        (folder / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(names) + "\n")


def text(folder: Path) -> None:
    """Write `train.txt`, `valid.txt`, `test.txt` and `input.txt`."""
    for name, count in (("train", 700), ("valid", 60), ("test", 60), ("input", 3000)):
        (folder / f"{name}.txt").write_text("\n".join([*sentences(count), "O God, O God!"]) + "\n")


def characters(folder: Path) -> None:
    """Write a text as the numbers of its characters, as nanoGPT prepares it."""
    written = "\n".join(sentences(4000))
    names = sorted(set(written))
    numbers = np.array([names.index(each) for each in written], dtype=np.uint16)
    numbers[:-20_000].tofile(folder / "train.bin")
    numbers[-20_000:].tofile(folder / "val.bin")
    with open(folder / "meta.pkl", "wb") as file:
        places = {each: number for number, each in enumerate(names)}
        pickle.dump({"vocab_size": len(names), "itos": dict(enumerate(names)), "stoi": places}, file)


def sine_waves(folder: Path) -> None:
    """Write `traindata.pt` with sine waves."""
    import torch

    starts = RANDOM.integers(-80, 80, (20, 1))
    torch.save(np.sin((np.arange(120) + starts) / 20.0), folder / "traindata.pt")


def vgg16(folder: Path) -> None:
    """Write a checkpoint of VGG16 with random weights."""
    import torch
    from torchvision import models  # type: ignore[import-not-found]

    torch.manual_seed(0)
    torch.save(models.vgg16().state_dict(), folder / "vgg16-397923af.pth")


def _tokenizer(folder: Path, *, is_bert: bool) -> Any:
    """Write a tokenizer of whole words, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] if is_bert else ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    names = [*special, *WORDS, ".", "user", "assistant", ":", "0", "1", "2", "3", "4"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if is_bert:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    pad, unknown, first, last, mask = special
    roles = {"pad_token": pad, "unk_token": unknown, "mask_token": mask}
    roles |= {"cls_token": first, "sep_token": last} if is_bert else {"bos_token": first, "eos_token": last}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **roles)
    if not is_bert:
        made.chat_template = (
            "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} </s> {% endfor %}"
            "{% if add_generation_prompt %}assistant : {% endif %}"
        )
    made.save_pretrained(folder)
    return made


def bert(folder: Path) -> None:
    """Write a BERT of two small layers with a tokenizer of whole words."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    vocabulary = len(_tokenizer(folder, is_bert=True))
    BertForMaskedLM(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=128,
        )
    ).save_pretrained(folder)


def llama(folder: Path) -> None:
    """Write a Llama of two small layers with a tokenizer of whole words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    vocabulary = len(_tokenizer(folder, is_bert=False))
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    ).save_pretrained(folder)


def _write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def glue(folder: Path) -> None:
    """Write pairs of sentences with labels as the configuration `mrpc` of a data set."""
    counts = {"train": 192, "validation": 64, "test": 64}
    for part, count in counts.items():
        rows = [
            {"sentence1": one, "sentence2": one if label else other, "label": int(label), "idx": number}
            for number, (one, other, label) in enumerate(
                zip(sentences(count), sentences(count), RANDOM.integers(0, 2, count), strict=True)
            )
        ]
        _write_json_lines(folder / "mrpc" / f"{part}.jsonl", rows)
    files = "".join(f"  - split: {part}\n    path: mrpc/{part}.jsonl\n" for part in counts)
    label = "  - name: label\n    dtype:\n      class_label:\n        names:\n          '0': different\n          '1': same\n"
    text_columns = "".join(f"  - name: sentence{number}\n    dtype: string\n" for number in (1, 2))
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}dataset_info:\n- config_name: mrpc\n  features:\n"
        f"{text_columns}{label}  - name: idx\n    dtype: int64\n---\n"
    )


def _write_accuracy(path: Path) -> None:
    """Write a module of the package `evaluate` that computes the accuracy."""
    path.write_text(
        "import datasets\nimport evaluate\n\n\nclass Accuracy(evaluate.Metric):\n    def _info(self):\n"
        "        features = datasets.Features({'predictions': datasets.Value('int64'), 'references': datasets.Value('int64')})\n"
        "        return evaluate.MetricInfo(description='', citation='', inputs_description='', features=features)\n\n"
        "    def _compute(self, predictions, references):\n"
        "        return {'accuracy': sum(a == b for a, b in zip(predictions, references)) / len(references)}\n"
    )


def glue_metric(folder: Path) -> None:
    """Write the metric `glue`, as the accuracy."""
    _write_accuracy(folder / "glue.py")


def accuracy_metric(folder: Path) -> None:
    """Write the metric `accuracy`."""
    _write_accuracy(folder / "accuracy.py")


def conversations(folder: Path) -> None:
    """Write texts, preferences and prompts, each as a data set with a training and a test part."""
    for part, count in (("train", 64), ("test", 16)):
        pairs = list(zip(sentences(count), sentences(count), sentences(count), strict=True))
        _write_json_lines(folder / "texts" / f"{part}.jsonl", [{"text": f"{one} {two}"} for one, two, _ in pairs])
        preferences = [{"prompt": one, "chosen": f" {two}", "rejected": f" {three}"} for one, two, three in pairs]
        _write_json_lines(folder / "preferences" / f"{part}.jsonl", preferences)
        marked = [
            {"prompt": one, "completion": f" {two}", "label": number % 2 == 0} for number, (one, two, _) in enumerate(pairs)
        ]
        _write_json_lines(folder / "marked" / f"{part}.jsonl", marked)
        _write_json_lines(folder / "prompts" / f"{part}.jsonl", [{"prompt": one} for one, _, _ in pairs])


def reward(folder: Path) -> None:
    """Write a module with a reward function for GRPO."""
    (folder / "stand_in_reward.py").write_text(
        "def count_of_cats(completions, **kwargs):\n    return [float(completion.count('cat')) for completion in completions]\n"
    )


def wikipedia_and_sts(folder: Path) -> None:
    """Write sentences, and pairs of sentences with a score of their similarity, in the files of the STS benchmark."""
    (folder / "wiki1m_for_simcse.txt").write_text("\n".join(sentences(320)) + "\n")
    lines = ["split\tscore\tsentence1\tsentence2"]
    for part in ("dev", "test"):
        for one, other in zip(sentences(32), sentences(32), strict=True):
            kept = int(RANDOM.integers(0, 9))
            mixed = " ".join([*one.split()[:kept], *other.split()[kept:]])
            lines.append(f"{part}\t{kept / 8 * 5}\t{one}\t{mixed}")
    (folder / "stsbenchmark").mkdir()
    with gzip.open(folder / "stsbenchmark" / "stsbenchmark.tsv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def yolo(folder: Path) -> None:
    """Write images with a bright square, and the class and the position of the square, in the format of Ultralytics."""
    from PIL import Image

    for part, count in (("train", 48), ("val", 8)):
        (folder / "images" / part).mkdir(parents=True)
        (folder / "labels" / part).mkdir(parents=True)
        images, labels = _digits(count, 80, 3)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            row, column = divmod(int(label), 5)
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / "images" / part / f"{number}.png")
            place = f"{label % 2} {(column + 0.5) / 5} {(2 * row + 0.5) / 5} 0.2 0.2\n"
            (folder / "labels" / part / f"{number}.txt").write_text(place)
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: {0: even, 1: odd}\n")


def nanochat(folder: Path) -> None:
    """Write the tokenizer and the data that nanochat's scripts read."""
    import pyarrow
    import pyarrow.parquet
    import tiktoken  # type: ignore[import-not-found]
    import torch

    parts = ("user", "assistant", "python", "output")
    special = ["bos", *(f"{part}_{end}" for part in parts for end in ("start", "end"))]
    encoding = tiktoken.Encoding(
        name="bytes",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([number]): number for number in range(256)},
        special_tokens={f"<|{name}|>": 256 + number for number, name in enumerate(special)},
    )
    (folder / "tokenizer").mkdir()
    with open(folder / "tokenizer" / "tokenizer.pkl", "wb") as file:
        pickle.dump(encoding, file)
    torch.save(torch.tensor([1] * 256 + [0] * len(special), dtype=torch.int32), folder / "tokenizer" / "token_bytes.pt")
    for data in ("base_data_climbmix", "base_data"):
        (folder / data).mkdir()
        for number in range(2):
            texts = pyarrow.table({"text": [" ".join(sentences(6)) for _ in range(400)]})
            pyarrow.parquet.write_table(texts, folder / data / f"shard_{number:05d}.parquet", row_group_size=100)


RECIPES: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        mnist,
        mnist_of_lightning,
        image_folders,
        pets,
        bsds300,
        voc2012,
        text,
        characters,
        sine_waves,
        vgg16,
        bert,
        llama,
        glue,
        glue_metric,
        accuracy_metric,
        conversations,
        reward,
        wikipedia_and_sts,
        yolo,
        nanochat,
    )
}


def main() -> None:
    """Write the data of one recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    RECIPES[options.recipe](options.folder)


if __name__ == "__main__":
    main()
