//! Active demultiplexing (MS §VI): packets that name their receiver themselves.

use serde::Deserialize;

/// RFC 2474 §6: low bits of code points for local use.
const LOCAL_USE: u8 = 3;
const CODE_POINT_MAX: u8 = 63;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DemuxConfig {
    pub active: bool,
    /// DSCP of packets that do.
    pub marker: u8,
}

impl Default for DemuxConfig {
    fn default() -> DemuxConfig {
        DemuxConfig {
            active: false,
            marker: LOCAL_USE,
        }
    }
}

impl DemuxConfig {
    pub(crate) fn is_sound(self) -> bool {
        self.marker <= CODE_POINT_MAX && self.marker & LOCAL_USE == LOCAL_USE
    }

    /// Returns the traffic class of packets with a handle, if handles are enabled.
    pub(crate) fn traffic_class(self) -> Option<u8> {
        self.active.then_some(self.marker << 2)
    }
}
