"""The requests of the automated users."""

from __future__ import annotations

import time
from typing import Any

from earnest import http
from earnest.errors import EarnestError


class EvalError(EarnestError):
    """The server did not answer as expected."""


class EvalClient:
    """Requests to a live server. No request is sent again after a failure: feedback could count twice."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = http.Client(self.url, key or "", timeout=300.0, tries=1)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            return self._http.call(method, path, body).value
        except http.Refused as error:
            raise EvalError(f"{method} {path}: {error}") from None
        except http.NoAnswer as error:
            raise EvalError(f"{self.url} does not answer ({error}); is `earnest serve` running there?") from None

    def wait(self) -> None:
        while (status := self.call("GET", "/health")["status"]) == "loading":
            time.sleep(0.2)
        if status != "ok":
            raise EvalError(f"{self.url} could not load its model; its log has the reason.")

    def chat(self, model: str, prompt: str, **sampling: Any) -> tuple[str, list[str]]:
        """(completion id, the answers)."""
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], **sampling}
        found = self.call("POST", "/v1/chat/completions", body)
        return found["id"], [c["message"]["content"] for c in found["choices"]]

    def score(self, model: str, prompt: str, answer: str) -> float:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "completion": answer}
        return float(self.call("POST", "/v1/score", body)["logprob_sum"])

    def teach(self, items: list[dict[str, Any]]) -> list[str]:
        return [f["id"] for f in self.call("POST", "/v1/feedback", {"feedback": items})["data"]]

    def settled(self, ids: list[str]) -> list[dict[str, Any]]:
        """Wait until none of these feedbacks is queued."""
        found = []
        for name in ids:
            while (state := self.call("GET", f"/v1/feedback/{name}"))["status"] == "queued":
                time.sleep(0.1)
            found.append(state)
        return found
