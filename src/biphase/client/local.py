"""Servers on this machine's usual ports."""

import asyncio
from dataclasses import dataclass

from biphase.client.endpoint import Access, ask, connect
from biphase.errors import RunFailed

USUAL_PORTS = {8000: "vLLM", 30000: "SGLang", 8080: "llama.cpp", 11434: "Ollama", 1234: "LM Studio"}
LOOK_S = 2.0


@dataclass(frozen=True)
class Found:
    """A server that lists models, and the product that usually listens at its port."""

    url: str
    product: str
    models: tuple[str, ...]


async def find_local(access: Access, ports: dict[int, str] | None = None) -> list[Found]:
    """All OpenAI-compatible servers at the usual ports of the loopback interface, in the order of the table."""
    ports = USUAL_PORTS if ports is None else ports
    brief = Access(access.headers, min(LOOK_S, access.timeout_s), access.ca)
    async with connect(brief) as session:

        async def look(port: int, product: str) -> Found | None:
            url = f"http://127.0.0.1:{port}"
            try:
                reply = await ask(session, f"{url}/v1/models")
            except RunFailed:
                return None
            listed = reply.json()
            entries = listed.get("data") if isinstance(listed, dict) and reply.status == 200 else None
            if not isinstance(entries, list):
                return None
            return Found(url, product, tuple(str(e["id"]) for e in entries if isinstance(e, dict) and "id" in e))

        found = await asyncio.gather(*(look(port, product) for port, product in ports.items()))
    return [server for server in found if server is not None]


def only_one(found: list[Found], ports: dict[int, str] | None = None) -> Found:
    """The one server found; ``RunFailed`` lists the places looked at, or the servers, when it is none or several."""
    looked = ", ".join(f"{product} {port}" for port, product in (ports or USUAL_PORTS).items())
    if not found:
        raise RunFailed(f"no OpenAI-compatible server on this machine's usual ports ({looked}); give its URL")
    if len(found) > 1:
        listed = "; ".join(f"{s.url} ({s.product}'s port): {', '.join(s.models[:3]) or 'no model'}" for s in found)
        raise RunFailed(f"{len(found)} servers on this machine, say which: {listed}")
    return found[0]
