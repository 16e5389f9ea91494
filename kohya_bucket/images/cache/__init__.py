"""What headers say, kept between runs."""
