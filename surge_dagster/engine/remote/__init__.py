"""An encoder pool whose workers belong to the encoder service of the machine."""
