"""Alerts in a Slack channel, through Dagster's own package; it is the extra `slack`."""

from __future__ import annotations

from dataclasses import dataclass, field

from surge_dagster.alerts import Alert, NotDelivered
from surge_dagster.engine.errors import ConfigError

try:
    from dagster_slack import SlackResource
    from slack_sdk.errors import SlackClientError
except ImportError as error:
    raise ConfigError('Slack alerts need dagster-slack: pip install "surge-dagster[slack]"') from error


@dataclass(frozen=True, slots=True)
class SlackAlerts:
    """A hook that writes alerts into a channel.

    Attributes:
        slack: Dagster's resource; its token may be a `dagster.EnvVar`, which is read when an alert is sent.
        channel: such as "#embeddings"; the token's application must be a member of it.
    """

    slack: SlackResource = field(repr=False)
    channel: str

    def __call__(self, alert: Alert, /) -> None:
        """Write it.

        Raises:
            NotDelivered: Slack cannot be reached, or refuses.
        """
        client = self.slack.process_config_and_initialize().get_client()
        try:
            client.chat_postMessage(channel=self.channel, text=alert.text)
        except (SlackClientError, OSError) as error:
            answer = getattr(error, "response", None)
            reason = answer.get("error") if answer is not None else None
            raise NotDelivered(f"Slack did not take the message ({reason or type(error).__name__})") from None
