"""Three environments written with OpenEnv's own server classes, in one process: `python openenv_server.py`."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, CallToolAction, Environment, MCPEnvironment, Observation, State
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_types import CallToolObservation


class Seen(Observation):
    text: str = ""


class Guess(Action):
    text: str


class Move(Action):
    dx: int
    dy: int


class Digits(Environment[Guess, Seen, State]):
    """Guess the last digit of the seed; an answer that is no digit is an error of the server."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.digit = (seed or 0) % 10
        return Seen(text="Guess a digit.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        if action.text == "break":
            raise RuntimeError("the world is broken")
        right = action.text.strip() == str(self.digit)
        return Seen(text="Yes." if right else f"No, it is {self.digit}.", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State()


class Walk(Digits):
    """Reach (1, 1)."""

    SUPPORTS_CONCURRENT_SESSIONS = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.place = [0, 0]
        return Seen()

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:  # type: ignore[override]
        self.place = [self.place[0] + action.dx, self.place[1] + action.dy]
        there = self.place == [1, 1]
        return Seen(text=f"You are at {self.place}.", reward=1.0 if there else -0.1, done=there)


class Calculator(MCPEnvironment):
    """Two tools; the answer ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("calculator")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @tools.tool
        def answer(value: int) -> str:
            """Give the answer."""
            return "thanks"

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.numbers = (seed or 0, 7)
        return Seen(text=f"What is {self.numbers[0]} + 7?")

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.tool_name == "answer" and seen.error is None:
            seen.done, seen.reward = True, float(action.arguments["value"] == sum(self.numbers))
        return seen

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = FastAPI()
    app.mount("/digits", create_fastapi_app(Digits, Guess, Seen, max_concurrent_envs=64))
    app.mount("/walk", create_fastapi_app(Walk, Move, Seen))
    app.mount("/calculator", create_fastapi_app(Calculator, CallToolAction, CallToolObservation, 64))
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
