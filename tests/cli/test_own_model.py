"""The built-in engine's own shape and device, found without being told."""

from pathlib import Path

import pytest

from biphase.cli.own_model import own_hardware
from biphase.errors import BadInput
from biphase.models import DEFAULT_MODEL
from tests.scripted_server import scripted


@pytest.fixture(autouse=True)
def no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_without_a_device_the_floors_are_left_out_and_it_is_said() -> None:
    found, note = own_hardware("http://127.0.0.1:1", DEFAULT_MODEL, None)
    assert found is None
    assert "biphase calibrate" in str(note)


def test_the_engines_model_on_a_named_device() -> None:
    """SmolLM2-135M has 30 layers; the scripted server tells no type of its weights, so they are the file's."""
    with scripted() as url:
        found, note = own_hardware(url, DEFAULT_MODEL, "h100-sxm")
    assert note is None
    assert found is not None
    assert len(found.architecture.layers) == 30


def test_a_model_without_a_shape_here_is_said() -> None:
    with scripted() as url:
        found, note = own_hardware(url, "nobody/no-such-model", "h100-sxm")
    assert found is None
    assert "--model-config" in str(note)
    with pytest.raises(BadInput):
        own_hardware("http://127.0.0.1:1", DEFAULT_MODEL, "no-such-device")
