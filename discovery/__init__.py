"""From stored records to published artifacts: the nightly job."""
