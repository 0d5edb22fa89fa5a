"""The non-public parts of torch that the bridges and `callsheet exec` use, and what happens if torch does not have such a part."""

PACKAGE = "torch"

_EVAL_FRAME_MODULE = "torch._C._dynamo.eval_frame"
_HAS_MORE_GRAPHS = "torch.compile compiles callsheet's hooks with the user's code, so a compiled step may have more graphs"
_HOOK_STAYS = "if callsheet fails in this hook, the hook stays registered, and does nothing"

WITHOUT = {
    "torch._C._is_tracing": "`torch.jit.is_tracing` is called instead, which is slower",
    "torch.compiler._is_compiling_flag": "`torch.compiler.is_compiling` is called instead, which is slower",
    f"{_EVAL_FRAME_MODULE}._FrameAction": _HAS_MORE_GRAPHS,
    f"{_EVAL_FRAME_MODULE}._FrameExecStrategy": _HAS_MORE_GRAPHS,
    f"{_EVAL_FRAME_MODULE}.set_code_exec_strategy": _HAS_MORE_GRAPHS,
    "torch._dynamo.eval_frame.DisableContext._torchdynamo_disable": _HAS_MORE_GRAPHS,
    "torch.optim.Optimizer._optimizer_step_pre_hooks": _HOOK_STAYS,
    "torch.optim.Optimizer._optimizer_step_post_hooks": _HOOK_STAYS,
    "torch.amp.GradScaler._scale": "a run with a loss scaler is rejected",
    "torch.Tensor._version": "the host of Keras reads the learning rate from the device whenever it is used, which is slower",
    "torch.autograd.Variable._execution_engine": (
        "the host of Megatron Bridge logs a warning, and ends the backward pass and its microbatch when the next span starts"
    ),
}
"""The non-public parts of torch that the bridges use, by dotted name, each with what happens if torch does not have this part."""

EXEC = {
    "torch.utils.data.dataloader._BaseDataLoaderIter": "an error is logged, and no loop is observed",
    "torch.nn.Module._modules": "an error is logged, and no loop is observed",
    "torch.nn.Module._compiled_call_impl": "a model that was compiled in place gets hooks, which are compiled with it",
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": "a compiled model is not unwrapped",
    "torch.jit._recursive.create_script_module": "`torch.jit.script` also compiles the hooks of an observed model",
}
"""The non-public parts of torch that only `callsheet exec` uses, each with what happens if torch does not have this part."""
