"""Messages come back as they were, and whatever is not exactly a message is refused in words."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lcfl.fleet.messages import Message, decode, encode
from lcfl.fleet.parcel import MessageError, Parcel, refusal

MOST = 10**6
TENSORS = [
    torch.tensor([1.5, float("nan"), float("-inf"), -0.0]),
    torch.zeros(0, 3),
    torch.arange(6, dtype=torch.int32).reshape(2, 3).T,
    torch.tensor(7),
    torch.tensor([True, False]),
    torch.tensor([[1, 255]], dtype=torch.uint8),
    torch.tensor([1e300], dtype=torch.float64),
]


def back(message):
    return decode(encode(message), MOST)


def test_arrays_come_back_bit_for_bit():
    arrays = {f"name/{number}": tensor for number, tensor in enumerate(TENSORS)}
    found = back(Message("train", {"round": 3}, arrays)).arrays
    assert list(found) == list(arrays)
    for name, tensor in arrays.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


@given(st.dictionaries(st.text(max_size=9), PLAIN, max_size=5))
def test_fields_come_back(fields):
    assert back(Message("join", fields)).fields == fields


def changed(**changes):
    """Returns a parcel with one array [2] whose header is changed."""
    parcel = encode(Message("train", {}, {"model": torch.zeros(2)}))
    return replace(parcel, text=json.dumps(json.loads(parcel.text) | changes))


def array(**changes):
    return changed(arrays=[{"name": "model", "dtype": "float32", "shape": [2]} | changes])


@pytest.mark.parametrize(
    ("parcel", "words"),
    [
        (Parcel(""), "cannot be read"),
        (Parcel("[]"), "in version None of the format; this lcfl reads 1"),
        (Parcel("[" * 10**5), "cannot be read"),
        (changed(wire=2), "in version 2 of the format"),
        (changed(more=1), "more is missing or unknown"),
        (changed(kind=3), "kind: got 3; it must be str"),
        (changed(arrays=[]), "arrays: got 1; it must be 0"),
        (array(dtype="object"), "model: got dtype 'object'"),
        (array(dtype="float64"), "model: got 8 bytes; float64 of shape .2. has 16"),
        (array(shape=[2, -1]), "got -1; it must lie from 0"),
        (array(shape=[2**62]), "got 4611686018427387904; it must lie from 0 to"),
        (array(shape=[2**39, 2**39]), "model: got 8 bytes"),
        (array(shape=[2**40, 0]), "model: got 8 bytes"),
        (array(shape=[1] * 9), "and 9 dimensions"),
        (array(shape=[True]), "it must be int"),
        (array(dtype="bool", shape=[8]), None),
        (Parcel("x" * (2**20 + 1)), "characters of them text"),
        (replace(changed(), arrays=[bytes(MOST)]), "a message of 1.0 MiB"),
    ],
)
def test_anything_else_is_refused(parcel, words):
    if words is None:
        assert decode(parcel, MOST).arrays["model"].tolist() == [False] * 8
        return
    with pytest.raises(MessageError, match=words):
        decode(parcel, MOST)


def test_a_byte_that_is_no_truth_value_is_refused():
    with pytest.raises(MessageError, match="bytes other than 0 and 1 as bool"):
        decode(replace(array(dtype="bool", shape=[1]), arrays=[b"\2"]), MOST)


def test_a_tensor_of_another_type_is_not_sent():
    with pytest.raises(MessageError, match="model is a tensor of complex64; allowed are float32"):
        encode(Message("train", {}, {"model": torch.zeros(1, dtype=torch.complex64)}))


@pytest.mark.parametrize("text", ["", "[]", '{"fields": 3}', '{"fields": {"nonce": "ab"}}'])
def test_a_refusal_answers_any_request(text):
    refused = decode(refusal(Parcel(text), "because"), MOST)
    assert refused.kind == "refused" and refused.fields == {
        "nonce": "ab" if "ab" in text else None,
        "reason": "because",
    }
