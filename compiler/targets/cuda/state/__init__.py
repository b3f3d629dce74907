"""Device state kept between steps."""
