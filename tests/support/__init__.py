"""What several tests share: servers to test against. No test lives here."""
