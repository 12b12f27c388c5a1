//! Service classes and effective rates (ARC-H, MS §V).
