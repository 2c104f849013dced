"""Operations with a reference in plain torch and optional fused backends."""
