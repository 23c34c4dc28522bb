"""What each finding of reading and binding means. Findings across keys are explained by their rule."""

from dataclasses import dataclass
from typing import Final

from ms_zero.config.findings import Severity


@dataclass(frozen=True)
class Explanation:
    """A finding, at length.

    Args:
        id: MZ and three digits.
        title: What is asserted, a short sentence.
        severity: What the finding means for the config; see `Finding.severity`.
        explanation: Why it is so.
        fix: What to change.

    """

    id: str
    title: str
    severity: Severity
    explanation: str
    fix: str


READING: Final = (
    Explanation(
        "MZ001",
        "The file is a readable UTF-8 text of reasonable size",
        "error",
        "A config is a small regular UTF-8 file. A missing file, a folder, a pipe, a device, another "
        "encoding or a file of more than 128 KiB is refused before anything is parsed.",
        "Check the path, its permissions and the encoding; move long file lists into a glob pattern.",
    ),
    Explanation(
        "MZ002",
        "The file is one YAML mapping",
        "error",
        "The top level is one mapping from section names to sections. Tabs cannot indent in YAML, a value "
        "with ': ' inside needs quotes, and a second document (---) would be ignored silently, so it is "
        "refused.",
        "Correct the line that the message names.",
    ),
    Explanation(
        "MZ003",
        "A key is set once in a file",
        "error",
        "YAML readers silently keep the last of two equal keys, which hides an edit made to the first.",
        "Keep one of the two lines. To replace a value of an included file, write it once in the including "
        "file.",
    ),
    Explanation(
        "MZ004",
        "Every key is known",
        "error",
        "An unknown key is nearly always a typo; ignoring it would train with the default instead.",
        "Use the key that the message suggests, or remove the line.",
    ),
    Explanation(
        "MZ005",
        "A value has the type of its key",
        "error",
        "Values are not converted: true is no integer, 200.0 is no count, '8' in quotes is text. Numbers "
        "follow YAML 1.2, so 1e-3 is a number; yes, no, on and off are text.",
        "Write the value as the message says.",
    ),
    Explanation(
        "MZ006",
        "A number is finite and in range",
        "error",
        "Limits are what the program can represent or what has a meaning, such as a decay below 1. Infinity"
        " and NaN are never valid.",
        "Choose a value in the range that the message gives.",
    ),
    Explanation(
        "MZ007",
        "Required keys are present",
        "error",
        "Some keys have no default that would suit everyone, such as the number of steps and where to write.",
        "Add the key, or include a preset that has it.",
    ),
    Explanation(
        "MZ008",
        "Includes name existing files and end",
        "error",
        "include: lists presets (models/gpt-tiny) and files (./base.yaml, relative to the including file). "
        "Later entries win over earlier ones and the file itself wins over all. A file that includes "
        "itself, directly or not, has no meaning; depth and number of files are bounded.",
        "Correct the name, or break the circle that the message shows.",
    ),
    Explanation(
        "MZ009",
        "An override is section.key=value",
        "error",
        "Overrides are applied last, in order. The value is YAML: numbers, true, false, null, [a, b], text.",
        "Write it like train.steps=20, in quotes if the shell would split or expand it.",
    ),
    Explanation(
        "MZ010",
        "A choice is one of the listed values",
        "error",
        "Keys that choose an algorithm or a mode take a fixed set of words, in exact spelling.",
        "Use one of the values that the message lists.",
    ),
    Explanation(
        "MZ011",
        "Only plain YAML values",
        "error",
        "Tags such as !!python/object can run code in careless readers, and merge keys (<<) compete with "
        "include. A config needs neither.",
        "Write the value itself; use include: to share settings.",
    ),
    Explanation(
        "MZ012",
        "Aliases do not multiply without bound",
        "error",
        "A few lines of aliases that refer to aliases can stand for billions of values, or for themselves. "
        "All values are counted as if they were written out, and at most 20,000 are read.",
        "Write the values out, or use a glob pattern for long file lists.",
    ),
    Explanation(
        "MZ013",
        "Nesting is shallow",
        "error",
        "A config has sections and keys; more than 16 levels of nesting is a mistake or an attack.",
        "Look for an unclosed bracket.",
    ),
    Explanation(
        "MZ016",
        "Text is not empty and printable",
        "error",
        "Names and paths without characters, or with control characters, cannot be meant.",
        "Write the text without control characters, or null where the key allows it.",
    ),
)
