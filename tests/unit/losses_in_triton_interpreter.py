"""Liger's and FLA's losses in Triton's interpreter, against fp64; test_losses.py runs it as a process.

Their kernels need no GPU there, so that our use of the two libraries is tested everywhere. The backends' own
check, which asks for a GPU, is passed by.
"""

import torch
from test_losses import CONFIGS, CPU, error, make_case, truth

from linrnn.losses.fla import Fla
from linrnn.losses.liger import Liger

case = make_case(torch.float32)
loss, grad_h, grad_w = truth(case)
for name, backend in (("liger", Liger), ("liger-fp32", Liger), ("fla", Fla)):
    compute = backend(CONFIGS[name], CPU)
    hidden, weight = case.leaves()
    output = compute(hidden, weight, case.labels)
    (output.sum_nats * case.scale).backward()
    assert error(output.sum_nats, loss) < 1e-6, name
    assert error(hidden.grad, grad_h) < 1e-6, name
    assert error(weight.grad, grad_w) < 1e-6, name

    _, weight = case.leaves()  # a frozen backbone
    (compute(case.hidden, weight, case.labels).sum_nats * case.scale).backward()
    assert error(weight.grad, grad_w) < 1e-6, name

    with torch.no_grad():
        assert error(compute(case.hidden, case.weight, case.labels).sum_nats, loss) < 1e-6, name

    hidden, weight = case.leaves()
    ignored = compute(hidden, weight, torch.full_like(case.labels, -100))
    ignored.sum_nats.backward()
    assert ignored.sum_nats == 0, name
    assert not hidden.grad.any(), name
    assert not weight.grad.any(), name
    print(name, "ok")
