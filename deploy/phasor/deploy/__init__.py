"""What people start: the fleet of workers under Ray, a local deployment, the `phasor` command."""
