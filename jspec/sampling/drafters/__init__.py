"""One file a drafter; the contract is `jspec.types.Drafter`."""
