"""The files, headers and endpoints of the web page."""

from __future__ import annotations

import re
from pathlib import Path

from tests.serve.http.served import Serve
from tfexport.model.model import Model
from tfexport.serve.config import HttpConfig
from tfexport.serve.routes import ui as page

FOLDER = Path(page.__file__).parents[1] / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Names that are no addresses.
NAMESPACES = {"http://www.w3.org/2000/svg"}


async def test_every_file_is_served_with_the_policy(serve: Serve) -> None:
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    async with serve() as served:
        for path in FOLDER.iterdir():
            found = await served.client.get("/" if path.name == "index.html" else f"/page/{path.name}")
            assert (found.status_code, found.content) == (200, path.read_bytes())
            assert found.headers["content-type"] == f"{types[path.suffix]}; charset=utf-8"
            assert found.headers["content-security-policy"] == POLICY
            assert found.headers["x-content-type-options"] == "nosniff"
            assert found.headers["referrer-policy"] == "no-referrer"
        for path in ("/page/", "/page/missing.js", "/page/../app.py", "/page/%2e%2e/app.py"):
            assert (await served.client.get(path)).status_code == 404


def test_the_files_refer_only_to_each_other() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    for name, text in files.items():
        outside = set(re.findall(r"(?:https?:)?//[\w.-]+\.[\w./-]+", text)) - NAMESPACES
        assert not outside, name
    referred = set(re.findall(r'(?:src|href)="page/([^"]+)"', files["index.html"]))
    referred |= {one for text in files.values() for one in re.findall(r'from "\./([^"]+)"', text)}
    assert referred == files.keys() - {"index.html"}


async def test_without_the_page_its_files_are_404(serve: Serve) -> None:
    async with serve(HttpConfig(ui=False)) as served:
        for path in (*page.PATHS, "/page/models"):
            assert (await served.client.get(path)).status_code == 404
        assert (await served.client.get("/livez")).status_code == 200


async def test_the_page_receives_the_properties_of_a_model(serve: Serve, texts: list[str]) -> None:
    async with serve(slots=3) as served:
        (shown,) = (await served.client.get("/page/models")).json()["models"]
        assert (shown["name"], shown["state"], shown["is_ready"]) == ("dates", "ready", True)
        assert shown["facts"]["Maximum source"] == "64 tokens"
        assert shown["reads"] == "text"
        assert shown["facts"]["Slots"] == "3"
        assert re.fullmatch(r"\d\.\d MB, fp32", shown["facts"]["Weights"])
        assert shown["facts"]["Threads"] == "1 encoder, 1 decoder"
        assert shown["has_alignment"] is False
        assert 1 <= len(shown["examples"]) <= page.NUM_EXAMPLES
        assert set(shown["examples"]) <= set(texts)


async def test_tokens_are_those_of_the_tokenizer(serve: Serve, model: Model) -> None:
    assert model.tokenizer
    text = "Thu, 5 Mar 1959"
    (result,) = model.generate([text])
    (source_ids,) = model.tokenizer.encode([text])
    source, target = model.tokenizer.tokens(source_ids, result.token_ids)
    async with serve() as served:
        found = await served.client.post(
            "/page/models/dates/tokens", json={"text_input": text, "target_ids": list(result.token_ids)}
        )
        assert found.json() == {
            "source_ids": source_ids,
            "target_ids": list(result.token_ids),
            "source_tokens": list(source),
            "target_tokens": list(target),
        }
        for target_ids in ([-1], [388], [2**63], ["1"], "1", None):
            data = {"text_input": "1", "target_ids": target_ids}
            found = await served.client.post("/page/models/dates/tokens", json=data)
            assert found.status_code == 400
            assert "t" in found.json()["error"]
