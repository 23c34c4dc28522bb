import numpy as np
import pytest

from ms_zero.data.tokenizer import ByteTokenizer, get_tokenizer, token_dtype
from ms_zero.errors import UserError

TEXTS = ["", "plain", "line\r\nline\n", "日本語 and ümlaut", "\x00\x7f\x80ÿ", "🚀" * 3, "\ufeffmark"]


@pytest.mark.parametrize("text", TEXTS)
def test_decode_inverts_encode(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.astype(np.int32).tolist()) == text


def test_every_byte_has_its_id_and_eot_is_the_last():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.decode(np.array([104, 256, 105, 256])) == "hi"


def test_bytes_that_are_no_text_are_replaced():
    assert ByteTokenizer().decode(np.array([0xFF, 65, 0xE6, 0x97])) == "\ufffdA\ufffd"


@pytest.mark.parametrize("bad", [257, -1, 50256])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(UserError, match=rf"{bad}.*expected 0 to 256"):
        ByteTokenizer().decode(np.array([65, bad]))


def test_tokenizers_are_found_by_name():
    assert isinstance(get_tokenizer("byte"), ByteTokenizer)
    assert get_tokenizer("none") is None
    for name in ("bytes", "file"):
        with pytest.raises(UserError, match=f"data.tokenizer='{name}': expected byte, none, or file and"):
            get_tokenizer(name)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32), (151_936, np.int32)],
)
def test_token_dtype_holds_the_largest_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1
