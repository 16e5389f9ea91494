"""What is said of files that people write by hand, and of counts."""

import json

import pytest

from kohya_bucket.texts import counted, parse_json


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ('{"a": 1,}', "line 1, column", "a comma before the closing bracket"),
        ('{\n"a": [1, 2,\n]}', "line ", "a comma before the closing bracket"),
        ('{"a": 1\n"b": 2}', "line 2, column 1", "a comma or a colon is missing"),
        ('{"a" 1}', "line 1, column 6", "a comma or a colon is missing"),
        (r'{"folder": "C:\data"}', "line 1, column 15", "write Windows paths with /"),
        ('{"a": "x\n}', "line 1, column", "a text is not closed"),
        ('{"a": "x', "line 1, column 7", "a text is not closed"),
        ('{"a": [1, 2', "line 1", "a bracket is not closed"),
        ("", "line 1, column 1", "it is empty"),
        ("{'a': 1}", "line 1, column 2", "double quotes"),
        ("{a: 1}", "line 1, column 2", "double quotes"),
        ('{"a": True}', "line 1, column 7", "write true"),
        ('{"a": None}', "line 1, column 7", "write null"),
        ("# x\n{}", "line 1, column 1", "JSON has no comments"),
        ('{"a": 1}}', "line 1, column 9", "this bracket closes nothing"),
    ],
)
def test_a_mistake_in_json_is_said_in_words_with_its_place(text, place, what):
    with pytest.raises(ValueError, match=place) as found:
        parse_json(text)
    assert what in str(found.value)
    assert "Expecting" not in str(found.value)


def test_what_is_json_stays_json():
    value = {"a": [1, 2.5, None, True, {"b": "C:\\x, ] }"}], "": []}
    assert parse_json(json.dumps(value, indent=1)) == value


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (0, ("image",), "0 images"),
        (1, ("image",), "1 image"),
        (1200, ("image",), "1,200 images"),
        (1, ("batch",), "1 batch"),
        (2, ("batch",), "2 batches"),
        (3, ("process",), "3 processes"),
        (1, ("image", "is", "are"), "1 image is"),
        (2, ("image", "is", "are"), "2 images are"),
    ],
)
def test_counts_agree_with_their_words(count, words, text):
    assert counted(count, *words) == text
