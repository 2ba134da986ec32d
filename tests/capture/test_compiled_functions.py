"""What torch.compile makes of clew: nothing; its functions run as they are beside a compiled function."""

import clew

TRAIN = """
import torch, warnings
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from clew.capture.torch.optimizers import OptimizerLens
from clew.capture.torch.probe_events import LoopEvents
from clew.capture.torch.recorder import Recorder

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)

@torch.compile(backend="eager")
def step():
    optimizer.step()

@torch.compile(backend="eager", fullgraph=True)
def clip():
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

with warnings.catch_warnings(record=True) as caught:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        clip()
        step()
own = (LoopEvents.tell, OptimizerLens._before_step, OptimizerLens._after_step, Recorder.ask, Recorder.is_off)
print([function.__name__ for function in own if _debug_get_cache_entry_list(function.__code__)])
print([str(each.message) for each in caught if "get_ident" in str(each.message)])
"""


def test_compiled_optimizers_are_seen_and_clew_is_not_compiled(zygote, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    ending = zygote.clew(tmp_path, "run", "--name", "run", "train.py")
    assert (ending.code, ending.stdout) == (0, "[]\n[]\n"), ending.stderr
    run = clew.open_run(tmp_path / "runs" / "run")
    assert len(run.ended_steps) == 3
    assert run.faults() == []
