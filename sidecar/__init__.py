"""From artifacts and live records to answers: the service that runs beside an inference server."""
