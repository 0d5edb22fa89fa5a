"""Reads TensorBoard's event files: scalars, images in PNG format, and hyperparameters of the HParams plugin."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from callsheet.core import optional as extras
from callsheet.report.imports.imported_run import ImportedRun, with_prefix
from callsheet.report.imports.lightning import add_hyperparameters, run_name
from callsheet.report.imports.source import EVENT_FILE_INFIX, Source

LOOKS_FOR = f"files {EVENT_FILE_INFIX}*"

_MAX_EVENT_BYTES = 64 * 2**20
_MAX_IMAGES_PER_EVENT = 1000
_SPLIT_OF_FOLDER = {
    "train": "train/",
    "training": "train/",
    "test": "test/",
    "validation": "validation/",
    "valid": "validation/",
    "val": "validation/",
    "eval": "validation/",
}
"""Folders that Keras and TensorFlow make inside a run's folder, and the prefix that the metrics in each folder get."""


def find(source: Source) -> list[Path]:
    """Return the folders that directly contain event files."""
    return list(dict.fromkeys(path.parent for path in source.files if EVENT_FILE_INFIX in path.name))


def read(source: Source) -> Iterator[ImportedRun]:
    """Yield one run for each folder with event files. Subfolders that belong to the same run are added to it.

    Folders such as `train` and `validation` belong to the run of the folder above. So do the folders that PyTorch's
    `add_scalars` and `add_hparams` make inside the folder of a `SummaryWriter`.

    Raises:
        MissingPackage: tensorboard is not installed.
    """
    reader = _EventReader()
    folders = find(source)
    parts: dict[Path, list[tuple[Path, str]]] = {}
    for folder in folders:
        if folder != source.folder and folder.name.lower() in _SPLIT_OF_FOLDER:
            parts.setdefault(folder.parent, []).append((folder, _SPLIT_OF_FOLDER[folder.name.lower()]))
        else:
            parts.setdefault(folder, []).insert(0, (folder, ""))
    made_by_writers: set[Path] = set()
    for main in list(parts):
        if main in made_by_writers:
            continue
        run = ImportedRun(_name(main, source), str(main))
        for folder, prefix in parts[main]:
            reader.read_folder(run, source, folder, prefix)
        inside = [each for each in parts if each.parent == main and parts[each] == [(each, "")]] if main in folders else []
        for folder in inside:
            part = ImportedRun(folder.name, str(folder))
            reader.read_folder(part, source, folder, "")
            if _add_writer_folder(run, part):
                made_by_writers.add(folder)
        run.reason = "event files do not record how a run ended"
        yield run


def _name(folder: Path, source: Source) -> str:
    if folder == source.folder or folder.parent == source.folder:
        return run_name(folder)
    return "-".join(folder.relative_to(source.folder).parts)


def _add_writer_folder(run: ImportedRun, part: ImportedRun) -> bool:
    """Add the subfolder `part` to the run if PyTorch's `add_scalars` or `add_hparams` wrote it. Return whether it was added.

    `add_scalars("loss", {"train": ...})` writes the metric `loss` to the folder `loss_train`, and `add_hparams` writes to a folder
    whose name is a time.
    """
    names = part.metrics.names
    if len(names) == 1 and not part.images and part.name.startswith(begin := f"{names[0].replace('/', '_')}_"):
        part.metrics.rename({names[0]: f"{names[0]}/{part.name.removeprefix(begin)}"})
    elif not (part.hyperparameters and re.fullmatch(r"\d+\.\d+", part.name)):
        return False
    run.metrics.add_all(part.metrics)
    run.hyperparameters |= part.hyperparameters
    run.left_out.update(part.left_out)
    run.warnings += part.warnings
    return True


class _EventReader:
    """Reads event files into runs. TensorBoard's own package parses the events."""

    def __init__(self) -> None:
        def load(module: str) -> Any:
            return extras.load(module, extra="tensorboard", wanted_by="callsheet import")

        self._event = load("tensorboard.compat.proto.event_pb2").Event
        self._start = load("tensorboard.compat.proto.event_pb2").SessionLog.START
        self._hparams = load("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
        self._checksum = load("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c
        self._array = load("tensorboard.util.tensor_util").make_ndarray
        self._not_parsed: type[Exception] = load("google.protobuf.message").DecodeError

    def read_folder(self, run: ImportedRun, source: Source, folder: Path, prefix: str) -> None:
        """Add the events of the files directly in `folder` to the run, in the order of the files' names."""
        part = ImportedRun(run.name, run.key)
        plugins: dict[str, str] = {}  # each tag's plugin, which TensorBoard may write only with the tag's first value
        for path in source.files:
            if path.parent == folder and EVENT_FILE_INFIX in path.name:
                for event in self._events(path, run):
                    self._add(part, event, prefix, plugins)
        run.metrics.add_all(part.metrics, prefix)
        for image in part.images:
            run.add_image(with_prefix(image.name, prefix), image.step, image.time, image.png)
        run.left_out.update(part.left_out)
        run.hyperparameters |= part.hyperparameters
        add_hyperparameters(run, folder, extra="train")

    def _events(self, path: Path, run: ImportedRun) -> Iterator[Any]:
        """Yield the events of a file. Skip damaged events. Stop at a damaged length field, because no later event can be found."""
        damaged = 0
        try:
            with open(path, "rb") as file:
                left = path.stat().st_size
                while header := file.read(12):
                    left -= 12
                    if len(header) < 12:
                        run.warnings.append(f"{path} is cut off; what comes before is imported")
                        break
                    length, checksum = struct.unpack("<QI", header)
                    if self._checksum(header[:8]) != checksum:
                        run.warnings.append(f"{path} is damaged {left + 12} bytes before its end; the rest is left out")
                        break
                    left -= length + 4
                    if left < 0:
                        run.warnings.append(f"{path} is cut off; what comes before is imported")
                        break
                    if length > _MAX_EVENT_BYTES:
                        file.seek(length + 4, 1)
                        run.left_out["events that are too large"] += 1
                        continue
                    content = file.read(length)
                    try:
                        if self._checksum(content) != struct.unpack("<I", file.read(4))[0]:
                            raise ValueError
                        event = self._event.FromString(content)
                    except (ValueError, struct.error, self._not_parsed):
                        damaged += 1
                        continue
                    yield event
        except OSError as error:
            run.warnings.append(f"{path} cannot be read: {error}")
        if damaged:
            run.warnings.append(f"{path} has damaged events, which are left out ({damaged})")

    def _add(self, run: ImportedRun, event: Any, prefix: str, plugins: dict[str, str]) -> None:
        what = event.WhichOneof("what")
        if what == "session_log":
            # A start event means that the run was resumed at this step: delete the values of this step and of later steps.
            if event.session_log.status == self._start and event.step > 0:
                run.metrics.drop_from(event.step)
                run.images = [image for image in run.images if image.step < event.step]
        elif what == "graph_def":
            run.left_out["graphs"] += 1
        elif what == "summary":
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name or plugins.get(value.tag, "")
                plugins[value.tag] = plugin
                self._add_value(run, event, value, plugin)

    def _add_value(self, run: ImportedRun, event: Any, value: Any, plugin: str) -> None:
        kind = value.WhichOneof("value")
        if plugin == "hparams":
            self._add_hparams(run, value.metadata.plugin_data.content)
        elif kind == "simple_value":
            run.metrics.add(value.tag, event.step, float(value.simple_value), event.wall_time)
        elif kind == "image":
            run.add_image(value.tag, event.step, event.wall_time, value.image.encoded_image_string)
        elif kind == "tensor" and plugin == "scalars":
            number = self._scalar(value.tensor)
            if number is None:
                run.left_out["values that are not numbers"] += 1
            else:
                run.metrics.add(value.tag, event.step, number, event.wall_time)
        elif kind == "tensor" and plugin == "images":
            for png in value.tensor.string_val[2 : 2 + _MAX_IMAGES_PER_EVENT]:  # skip the first two texts: width and height
                run.add_image(value.tag, event.step, event.wall_time, png)
        else:
            names = {"histo": "histograms", "histograms": "histograms", "audio": "audio clips", "text": "texts"}
            run.left_out[names.get(plugin) or names.get(str(kind)) or "summaries of other kinds"] += 1

    def _scalar(self, tensor: Any) -> float | None:
        # A damaged file may state any shape, and `make_ndarray` would allocate an array of that shape. So check the size first.
        if math.prod(each.size for each in tensor.tensor_shape.dim) != 1:
            return None
        try:
            return float(self._array(tensor).item())
        except (ValueError, TypeError, AttributeError):
            return None

    def _add_hparams(self, run: ImportedRun, content: bytes) -> None:
        try:
            found = self._hparams.FromString(content).session_start_info.hparams
        except self._not_parsed:
            run.warnings.append("hyperparameters of the HParams plugin are damaged, and left out")
            return
        for name, value in found.items():
            kind = value.WhichOneof("kind")
            if kind in ("number_value", "string_value", "bool_value"):
                number = getattr(value, kind)
                run.hyperparameters[name] = int(number) if isinstance(number, float) and number.is_integer() else number
