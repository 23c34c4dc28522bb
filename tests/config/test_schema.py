import dataclasses
from typing import get_args, get_type_hints

import pytest

from ms_zero.config import RunConfig, schema

NESTED = (schema.RopeScaling, schema.LatentConfig, schema.DataPart)
OWNERS = [*schema.MODEL_FAMILIES.values(), *NESTED, *schema.SECTIONS.values()]


def test_the_sections_are_those_of_a_run():
    hints = get_type_hints(RunConfig)
    assert get_args(hints.pop("model")) == tuple(schema.MODEL_FAMILIES.values())
    assert hints == schema.SECTIONS


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_every_key_is_documented_and_frozen(owner):
    assert owner.__dataclass_params__.frozen
    for name, (spec, _) in schema.keys_of(owner).items():
        assert spec.doc[0].isupper() or spec.doc.split(":")[0].split()[0].islower(), name
        assert spec.doc.endswith("."), name


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_defaults_fit_their_own_limits(owner):
    for name, (spec, annotation) in schema.keys_of(owner).items():
        if isinstance(spec.default, int | float) and annotation is not bool:
            assert spec.allows(spec.default), name
        if spec.used_when is not None:
            assert spec.used_when[0] in schema.keys_of(owner), name
            assert spec.default is not schema.REQUIRED, name


def test_a_derived_key_has_no_default_in_the_constructor():
    with pytest.raises(TypeError, match="micro_batch_size"):
        schema.TrainConfig(steps=1, global_batch_size=1, accumulation_steps=1, output_dir="o")
    with pytest.raises(TypeError, match="positional"):
        schema.MonitorConfig(True)
    assert dataclasses.replace(schema.MonitorConfig(), console=False).console is False
