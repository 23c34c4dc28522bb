"""The data of a run, as its config says."""

from ms_zero.config import DataConfig, DataPart, RunConfig
from ms_zero.data.text import MixtureData, Source, TextData, load_text
from ms_zero.data.tokenizer import Tokenizer, get_tokenizer


def load_data(config: RunConfig) -> TextData | MixtureData:
    """Read, tokenize, split and pack the data of a run; see `load_text`."""
    return load_text(
        sources_of(config.data),
        tokenizer=tokenizer_of(config.data),
        vocab_size=config.model.vocab_size,
        seq_len=config.data.seq_len,
        validation_fraction=config.data.validation_fraction,
    )


def sources_of(data: DataConfig) -> list[Source]:
    """What a run reads: one source, or the parts of a mixture."""
    if data.source == "mixture":
        return [_source(part) for part in data.parts]
    return [Source(data.source, data.files)]


def tokenizer_of(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of a run; None when its data is read as it is."""
    return get_tokenizer(data.tokenizer, data.tokenizer_file, data.eot_token)


def _source(part: DataPart) -> Source:
    return Source(part.source, part.files, part.weight)
