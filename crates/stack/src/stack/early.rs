//! Frames that arrive at a slot before its session: the packet filter delivers them there as soon as the
//! flow's row points to the slot, while the session may still be in transfer. They are kept, so that the
//! session gets them in order; both the frames per slot and the bytes in total are limited.

use portolan_proto::filter::RecordHeader;
use portolan_types::Generation;

/// Limit of the frames waiting at one slot.
pub(super) const AT_A_SLOT: usize = 2048;
/// Limit of the bytes of all waiting frames.
pub(super) const IN_ALL: usize = 4 << 20;

/// For whichever session comes to the slot next, if that has the frame's flow.
pub(crate) const OF_NEXT: Generation = Generation(u32::MAX);

/// A slot reserved for a session.
#[derive(Debug, Default)]
pub(super) struct EarlyFrames {
    /// Generation of the session that was here before: its frames are not for the new one.
    pub(super) before: Option<Generation>,
    held: Vec<EarlyFrame>,
}

#[derive(Debug)]
pub(super) struct EarlyFrame {
    pub(super) record: RecordHeader,
    pub(super) frame: Vec<u8>,
}

impl EarlyFrame {
    /// Returns the record of the frame for the session of that generation.
    pub(super) fn record_for(&self, generation: Generation) -> RecordHeader {
        let is_of_next = self.record.generation == OF_NEXT.0;
        RecordHeader {
            generation: if is_of_next {
                generation.0
            } else {
                self.record.generation
            },
            ..self.record
        }
    }
}

impl EarlyFrames {
    pub(super) fn after(before: Option<Generation>) -> EarlyFrames {
        EarlyFrames {
            before,
            held: Vec::new(),
        }
    }

    /// Whether the frame may be for the expected session.
    pub(super) fn expects(&self, record: &RecordHeader) -> bool {
        self.before != Some(Generation(record.generation))
    }

    /// Keeps a frame, if there is room besides `others`, the bytes already waiting in all slots.
    pub(super) fn hold(&mut self, others: &mut usize, record: &RecordHeader, frame: &[u8]) -> bool {
        let bytes = *others + frame.len();
        let has_room = self.held.len() < AT_A_SLOT && bytes <= IN_ALL;
        if has_room {
            *others = bytes;
            self.held.push(EarlyFrame {
                record: *record,
                frame: frame.to_vec(),
            });
        }
        has_room
    }

    /// Returns all waiting frames, in order.
    pub(super) fn release(self, others: &mut usize) -> Vec<EarlyFrame> {
        *others -= self.held.iter().map(|held| held.frame.len()).sum::<usize>();
        self.held
    }
}
