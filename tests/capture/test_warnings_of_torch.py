"""What torch warns of names the user's line, as without clew."""

import warnings

import torch


def _line_of(warning):
    return warning.filename, warning.lineno


def _provoke():
    """Return the places that three warnings of torch about their callers name."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.nn.utils.clip_grad_norm_((parameter for parameter in ()), 1.0)
        torch.optim.lr_scheduler.StepLR(optimizer, 2).step()
        torch.nn.Sequential(torch.nn.Softmax())(torch.ones(2))
    return [_line_of(warning) for warning in caught]


def test_warnings_name_the_callers_line(record):
    plain = _provoke()
    with record():
        assert _provoke() == plain
    assert len(plain) == 3
    assert [file for file, _ in plain[:2]] == [__file__, __file__]


def test_filters_by_module_hold(record):
    with record(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=__name__)
        torch.nn.utils.clip_grad_norm_((parameter for parameter in ()), 1.0)
