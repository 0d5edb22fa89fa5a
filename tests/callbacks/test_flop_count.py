from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from callsheet.callbacks.support.flop_count import OperationCounter, StepFlops, flops_reported_by, numbers_in


def counted(function: Any) -> OperationCounter:
    with OperationCounter() as counter:
        function()
    assert isinstance(counter, OperationCounter)
    return counter


def test_products_convolutions_and_attention_are_counted_forward_and_backward() -> None:
    inputs = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(8, 3, requires_grad=True)
    assert counted(lambda: (inputs @ weight).sum().backward()).flops == {"fp32": 3 * 2 * 5 * 8 * 3}
    images, kernels = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    convolved = counted(lambda: nn.functional.conv2d(images, kernels, padding=1).sum().backward())
    assert convolved.flops == {"fp32": 3 * 2 * 2 * 6 * 6 * 4 * 3 * 9}
    query = torch.randn(2, 4, 7, 8, requires_grad=True)
    attended = counted(lambda: nn.functional.scaled_dot_product_attention(query, query, query).sum().backward())
    product = 2 * 2 * 4 * 7 * 7 * 8
    assert attended.flops["fp32"] == 2 * product + 5 * product  # the backward computes the scores again


def test_the_count_equals_that_of_torch_s_flop_counter() -> None:
    layer, convolution = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Conv2d(3, 8, 3)
    inputs, images = torch.randn(2, 5, 16), torch.randn(2, 3, 9, 9)

    def step() -> None:
        (layer(inputs).sum() + convolution(images).sum()).backward()

    with FlopCounterMode(display=False) as own:
        step()
    assert counted(step).flops == {"fp32": own.get_total_flops()}
    assert own.get_total_flops() > 100_000


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_precision_is_that_of_the_operands(dtype: torch.dtype, precision: str) -> None:
    layer, inputs = nn.Linear(8, 8), torch.randn(4, 8)

    def step() -> None:
        with torch.autocast("cpu", dtype):
            outputs = layer(inputs)
        outputs.float().sum().backward()

    assert set(counted(step).flops) == {precision}
    assert set(counted(lambda: layer(inputs).sum().backward()).flops) == {"fp32"}
    assert set(counted(lambda: inputs.double() @ inputs.double().T).flops) == {"float64"}


@torch.library.custom_op("callsheet_tests::known", mutates_args=())
def known(inputs: Tensor) -> Tensor:
    """A custom operation with a FLOPs formula."""
    return inputs.clone()


@torch.library.custom_op("callsheet_tests::broken", mutates_args=())
def broken(inputs: Tensor) -> Tensor:
    """A custom operation whose FLOPs formula raises an error."""
    return inputs.clone()


def fails(*shapes: Any, out_shape: Any = None) -> int:
    raise ValueError("no such shape")


register_flop_formula(torch.ops.callsheet_tests.known)(lambda shape, out_shape=None: 10 * shape[0])
register_flop_formula(torch.ops.callsheet_tests.broken)(fails)


def test_a_custom_operation_is_counted_with_its_registered_formula() -> None:
    assert counted(lambda: known(torch.zeros(2))).flops == {"fp32": 20}


def test_a_formula_that_fails_is_reported_and_does_not_stop_the_operation() -> None:
    found: list[Tensor] = []
    counter = counted(lambda: found.append(broken(torch.zeros(2))))
    assert "callsheet_tests.broken failed: ValueError: no such shape" in counter.error
    assert torch.equal(found[0], torch.zeros(2))


class ReportsFlops(nn.Linear):
    flops_per_batch = 7


def test_the_flops_of_a_wrapped_model_are_found() -> None:
    model = ReportsFlops(2, 1)
    wrapped = torch.compile(DataParallel(model), backend="eager")
    assert flops_reported_by(model) == flops_reported_by(wrapped) == 7
    assert flops_reported_by(nn.Linear(2, 1)) is None
    assert flops_reported_by([model]) is None  # chunks of a pipeline: none of them reports the total


@pytest.mark.parametrize(
    ("batch", "numbers"),
    [
        (torch.ones(2, 3), 6),
        ((torch.ones(2, 3), torch.ones(2)), 6),
        ([[torch.ones(4)], torch.ones(2)], 4),
        ({"lengths": torch.ones(2), "input_ids": torch.ones(2, 5)}, 10),
        ({"pixels": torch.ones(2, 5), "labels": torch.ones(2)}, 10),
        ("text", 0),
    ],
)
def test_the_size_of_a_batch_is_that_of_its_main_tensor(batch: Any, numbers: int) -> None:
    assert numbers_in(batch) == numbers


def test_without_counting_the_precision_is_that_of_outputs_or_parameters() -> None:
    flops = StepFlops()
    flops.guess(nn.Linear(2, 1), {"logits": torch.ones(2), "more": (torch.ones(1, dtype=torch.bfloat16),)})
    assert flops.precision == "bf16"
    flops.guess(nn.Linear(2, 1).half(), torch.ones(2))
    assert flops.precision == "fp16"
    flops.guess(nn.Linear(2, 1), torch.ones(2))
    assert flops.precision == "fp32"


@pytest.fixture
def without_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def steps(flops: StepFlops, model: Any, number: int) -> list[Any]:
    """Run steps of two batches under autocast, and return the FLOPs of each."""
    recorded = []
    for _ in range(number):
        for _ in range(2):
            flops.add_batch(torch.ones(3, 2))
        flops.begin_step()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(torch.ones(6, 2))
        outputs.float().sum().backward()
        if flops.is_guessing:
            flops.guess(model, outputs)
        flops.end_step()
        recorded.append(flops.take(0)[0])
    return recorded


@pytest.mark.usefixtures("without_compiled_code")
def test_if_the_model_reports_its_flops_only_the_precision_is_measured() -> None:
    flops, model = StepFlops(), ReportsFlops(2, 1)
    flops.begin_run(model, needs_precision=True)
    assert not flops.is_done
    assert steps(flops, model, 3) == [14, 14, 14]
    assert (flops.precision, flops.rate, flops.is_done, flops.trouble) == ("bf16", None, True, "")


@pytest.mark.usefixtures("without_compiled_code")
def test_the_precision_of_a_compiled_model_is_that_of_its_outputs() -> None:
    flops, model = StepFlops(), torch.compile(ReportsFlops(2, 1), backend="eager")
    flops.begin_run(model, needs_precision=True)
    assert steps(flops, model, 3) == [14, 14, 14]
    assert (flops.precision, flops.trouble) == ("bf16", "")
    flops.begin_run(nn.Linear(2, 1))
    assert steps(flops, nn.Linear(2, 1), 3) == [None, None, None]
    assert "torch.compile" in flops.trouble


@pytest.mark.usefixtures("without_compiled_code")
def test_the_flops_of_a_step_scale_with_the_size_of_its_batches() -> None:
    flops, model = StepFlops(), nn.Linear(2, 1)
    flops.begin_run(model)
    of_a_step = 2 * 2 * 6 * 2  # forward, and backward for the weight
    # The FLOPs of the first step are not logged later, because its record is already complete.
    assert steps(flops, model, 3) == [
        None,
        of_a_step,
        of_a_step,
    ]
    assert flops.rate == of_a_step / 12
    flops.add_batch(torch.ones(4, 5))
    flops.begin_step()
    flops.add_batch(torch.ones(1))  # a fetch for a step that does not start
    resumed = StepFlops()
    resumed.load_state_dict(flops.state_dict())
    assert flops.take(0)[0] == resumed.take(0)[0] == of_a_step / 12 * 20
