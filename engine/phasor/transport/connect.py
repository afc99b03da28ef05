"""From configuration to links."""

from phasor.core.config import TransportConfig
from phasor.core.errors import ConfigError
from phasor.transport.gloo import GlooLinks
from phasor.transport.link import LinkFactory
from phasor.transport.nccl import NcclLinks


def link_factory_for(config: TransportConfig) -> LinkFactory:
    """Return the factory of links of the configured kind.

    Raises:
        ConfigError: the kind is unknown, or not available in this process.
    """
    if config.kind == "gloo":
        return GlooLinks(config.host, config.timeout_s)
    if config.kind == "nccl":
        return NcclLinks(config.host, config.timeout_s)
    raise ConfigError("transport.kind", config.kind, "must be 'gloo' or 'nccl'")
