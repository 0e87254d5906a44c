"""What a capture will take: bytes and hours, known once there is a plan and before any server starts."""

from collections.abc import Mapping
from typing import Any


def hours(plan: Mapping[str, Any], tokens_per_second: float | None) -> float | None:
    """Hours that the planned shards which were missing when it was made will take at this rate; None where no rate is assumed.

    Tokens of missing shards are taken as their share of all bytes.
    """
    if tokens_per_second is None:
        return None
    share = plan["bytes_needed"] / max(plan["bytes_needed"] + plan["bytes_present"], 1)
    return plan["accounting"]["totals"]["tokens"] * share / tokens_per_second / 3600


def forecast(plan: Mapping[str, Any], tokens_per_second: float | None) -> str:
    """One line for people."""
    size = f"{plan['accounting']['totals']['tokens']:,} tokens in {len(plan['shards']):,} shards"
    room = f"{plan['bytes_needed']:,} bytes to write, {plan['bytes_present']:,} there, {plan['disk_free']:,} free"
    estimate = hours(plan, tokens_per_second)
    if estimate is None:
        return f"{size}; {room}"
    return f"{size}; {room}; about {estimate:,.2f} hours at {tokens_per_second:,g} tokens/s"
