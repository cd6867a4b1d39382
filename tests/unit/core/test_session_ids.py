"""What is shown of a session's id."""

from __future__ import annotations

from kvpolicy.core.session_ids import shown_id, without_ids

ID = "0rAV1dKG-gSzQkWfCq1LJQsK6nW9_BbE"
PATH = "/v1/streaming/sessions/"


def test_the_first_eight_characters_are_shown() -> None:
    assert shown_id(ID) == "0rAV1dKG"
    assert shown_id("s") == "s"


def test_every_id_in_a_text_is_cut_and_short_ones_are_as_they_are() -> None:
    text = f"POST {PATH}{ID}/frame?frame_index=0, then DELETE {PATH}{ID} and {PATH}12345678, {PATH[:-1]}"
    expected = (
        f"POST {PATH}0rAV1dKG.../frame?frame_index=0, then DELETE {PATH}0rAV1dKG... and {PATH}12345678, {PATH[:-1]}"
    )
    assert without_ids(text) == expected
