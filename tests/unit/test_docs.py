import re
from pathlib import Path

from fp8_ds.config import Fp8Config

ROOT = Path(__file__).parents[2]


def config_sections() -> dict[str, dict[str, str]]:
    """The page's keys, each with its "- Field: text" lines (continued lines joined)."""
    page = (ROOT / "docs/config.md").read_text()
    sections = {}
    for section in page.split("\n### ")[1:]:
        name, _, body = section.partition("\n")
        joined = re.sub(r"\n  +", " ", body)
        sections[name.strip("`")] = dict(re.findall(r"^- ([^:\n]+): (.+)$", joined, flags=re.MULTILINE))
    return sections


def test_page_and_models_list_the_same_keys_values_and_defaults() -> None:
    shown = {
        name: (fields["Values"].replace("`", ""), fields["Default"].replace("`", ""))
        for name, fields in config_sections().items()
    }
    assert shown == {name: tuple(key) for name, key in Fp8Config.keys().items()}


def test_every_key_states_its_cost_and_when_to_change_it() -> None:
    for name, fields in config_sections().items():
        assert len(fields["Cost"]) > 10, name
        assert len(fields["Change it when"]) > 10, name


def test_links_between_pages_lead_to_files() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
