"""Initial values made part by part: the values of the whole, and never more memory than a part."""

import tracemalloc

import numpy as np
import pytest
from mindspore import Parameter

from ms_zero import _compat, models
from ms_zero.graph.initial import declare, fill, part_of, seeded_values
from ms_zero.parallel.placement import Box

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 64, "max_seq_len": 16}
REST = {"vocab_size": 40, "norm_eps": 1e-5, "init_std": 0.1, "dropout": 0.0, "tie_embeddings": True}


def gpt():
    return models.GPT(**SIZES, **REST, target="CPU-portable")


def quarter(shape, dim, index):
    size = shape[dim] // 4
    return Box.whole(shape).cut(dim, index * size, (index + 1) * size)


def test_declared_parameters_keep_everything_but_storage():
    model, plain = gpt(), gpt()
    next(iter(model.get_parameters())).requires_grad = False
    wanted = [(param.name, param.shape, param.requires_grad) for param in model.get_parameters()]
    declare(model)
    assert [(param.name, param.shape, param.requires_grad) for param in model.get_parameters()] == wanted
    assert all(param.has_init and not param.is_meta for param in model.get_parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert Parameter.init_param is True
    assert models.init_rules(model) == models.init_rules(plain)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_have_the_values_of_the_whole(dim):
    model, whole = gpt(), gpt()
    declare(model)
    models.initialise(whole, 5)
    values = seeded_values(model, 5)
    expected = dict(whole.parameters_and_names())
    boxes = {}
    for name, param in model.parameters_and_names():
        if name.startswith("transformer.h.1."):
            continue  # of another stage
        shape = tuple(param.shape)
        boxes[param.name] = quarter(shape, dim, 2) if len(shape) > dim else Box.whole(shape)
        param.shape = list(boxes[param.name].shape)  # as MindSpore does when it cuts a parameter
    fill(model.parameters_and_names(), boxes, values)
    for name, param in model.parameters_and_names():
        if param.name in boxes:
            part = boxes[param.name].take(expected[name].asnumpy())
            np.testing.assert_array_equal(param.asnumpy(), part, err_msg=name)
        else:
            assert param.has_init, name


def test_what_has_values_keeps_them():
    model = gpt()
    models.initialise(model, 5)
    before = [param.asnumpy() for param in model.get_parameters()]
    boxes = {param.name: Box.whole(tuple(param.shape)) for param in model.get_parameters()}
    fill(model.parameters_and_names(), boxes, lambda *_: pytest.fail("asked for values"))
    np.testing.assert_array_equal(before[0], next(iter(model.get_parameters())).asnumpy())


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_takes_the_memory_of_a_part(dim):
    shape = (2048, 1024)  # 8 MiB
    rule = models.init_rules(gpt())["transformer.wte.weight"]
    box = Box.whole(shape).cut(dim, 0, shape[dim] // 16)
    assert isinstance(rule, models.init.Normal)
    part_of("w", box, lambda name, start, stop: np.zeros(stop - start, np.float32))  # imports are not counted
    tracemalloc.start()
    part = part_of("w", box, lambda *at: models.initial_values(rule, "w", shape, 1, *at[1:]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Beside the part the generator's own arrays, of the range that it is asked for: far less than the whole.
    assert part.nbytes <= peak < 2048 * 1024 * 4


def test_declaring_takes_no_memory():
    tracemalloc.start()
    param = _compat.declared_parameter(gpt().lm_head.weight)
    before = tracemalloc.get_traced_memory()[0]
    assert param.has_init and before < 2**20
    tracemalloc.stop()
