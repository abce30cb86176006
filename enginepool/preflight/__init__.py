"""What has to hold before a pool starts: `serve` refuses by these rules, `doctor` reports them. Imports nothing heavy."""
