//! Sessions that move between holders: recall, relay, the far ends of their descriptors.

pub(crate) mod descriptors;
pub(crate) mod recall;
pub(crate) mod relay;
pub(crate) mod sessions;
