"""SchedulerOutput: the only thing that crosses from the scheduler to the runner.

Plain picklable data. A request's tokens and parameters are sent once, when a state row is made for
it; later steps carry only differences. Made by the scheduler, read by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagestream.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request entering the runner: for the first time, or again after a preemption."""

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, and what was generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step. Not frozen: that triples the cost of making one, and there is
    one for each request in each step."""

    request_id: str
    num_scheduled_tokens: int
    num_logits: int
    """Rows of logits wanted, from the last of its tokens backwards: 0 inside a prompt."""
    new_block_ids: list[int]
    num_computed_tokens: int
    """Before this step."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Released rows are to be dropped before new ones are made."""

    released_request_ids: list[str]
    """Finished or preempted since the last step: their state rows are free."""
    new_requests: list[NewRequest]
    scheduled: list[ScheduledRequest]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(request.num_scheduled_tokens for request in self.scheduled)
