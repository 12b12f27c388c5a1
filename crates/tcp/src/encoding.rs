//! How values are laid out in a capsule: fields in the order of their type's list, independent of the layout in memory.

use core::time::Duration;
use std::collections::VecDeque;

use arrayvec::ArrayVec;
use portolan_types::{Handle, Instant, SeqNum};

/// The version that is written, and the only one that is read. Any changed list of [`fields`] or [`variants`] needs a
/// new number.
pub const VERSION: u8 = 3;

/// Why a capsule was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("capsule of version {0}, not of {VERSION}")]
    Version(u8),
    #[error("capsule ends too early")]
    Short,
    #[error("{0} bytes follow the end of the capsule")]
    Long(usize),
    /// The type and the field.
    #[error("capsule has no value of {0}")]
    Value(&'static str),
    #[error("capsule breaks an invariant: {0}")]
    Inconsistent(#[from] Invalid),
    #[error("the capsule tells of no bytes beside it")]
    Unasked,
}

impl Refused {
    /// Names the expected value, if no name is set yet.
    pub fn of(self, what: &'static str) -> Refused {
        match self {
            Refused::Value("") => Refused::Value(what),
            other => other,
        }
    }
}

/// What is wrong with a decoded connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Invalid {
    #[error("the sending half contradicts itself")]
    Send,
    #[error("the receiving half contradicts itself")]
    Receive,
    #[error("the state contradicts the halves")]
    State,
    #[error("a counter is out of bounds")]
    Counters,
    #[error("an option is out of bounds")]
    Options,
}

/// A type that can be encoded in a capsule.
pub trait Encoded: Sized {
    fn put(&self, out: &mut Writer);
    fn take(from: &mut Reader<'_>) -> Result<Self, Refused>;
}

/// A capsule that is being written.
#[derive(Debug)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Creates a writer, with capacity for `room` bytes.
    pub fn new(room: usize) -> Writer {
        let mut bytes = Vec::with_capacity(1 + room);
        bytes.push(VERSION);
        Writer(bytes)
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// A capsule that is being read.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(capsule: &'a [u8]) -> Result<Reader<'a>, Refused> {
        match capsule {
            [VERSION, rest @ ..] => Ok(Reader(rest)),
            [version, ..] => Err(Refused::Version(*version)),
            [] => Err(Refused::Short),
        }
    }

    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Refused> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Refused::Short)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Checks that nothing follows.
    pub(crate) fn end(self) -> Result<(), Refused> {
        match self.0.len() {
            0 => Ok(()),
            more => Err(Refused::Long(more)),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refused> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(Refused::Short)?;
        self.0 = rest;
        Ok(*bytes)
    }

    /// Reads a number of items. Each takes at least one byte, so no count can allocate more than the capsule's length.
    fn count(&mut self) -> Result<usize, Refused> {
        let count = u32::take(self)? as usize;
        if count > self.0.len() {
            return Err(Refused::Short);
        }
        Ok(count)
    }
}

/// The order of a struct's fields, and the values of fields that are not encoded.
macro_rules! fields {
    ($name:ident { $($field:ident),* $(,)? } $(default { $($fixed:ident: $value:expr),* })?) => {
        impl $crate::encoding::Encoded for $name {
            fn put(&self, out: &mut $crate::encoding::Writer) {
                let $name { $($field,)* $($($fixed: _,)*)? } = self;
                $($crate::encoding::Encoded::put($field, out);)*
            }

            fn take(
                from: &mut $crate::encoding::Reader<'_>,
            ) -> Result<$name, $crate::encoding::Refused> {
                $(let $field = $crate::encoding::Encoded::take(from).map_err(
                    |refused| refused.of(concat!(stringify!($name), "::", stringify!($field))),
                )?;)*
                Ok($name { $($field,)* $($($fixed: $value,)*)? })
            }
        }
    };
    ($name:ident) => {
        impl $crate::encoding::Encoded for $name {
            fn put(&self, _out: &mut $crate::encoding::Writer) {}

            fn take(
                _from: &mut $crate::encoding::Reader<'_>,
            ) -> Result<$name, $crate::encoding::Refused> {
                Ok($name)
            }
        }
    };
    ($name:ident(_)) => {
        impl $crate::encoding::Encoded for $name {
            fn put(&self, out: &mut $crate::encoding::Writer) {
                $crate::encoding::Encoded::put(&self.0, out);
            }

            fn take(
                from: &mut $crate::encoding::Reader<'_>,
            ) -> Result<$name, $crate::encoding::Refused> {
                $crate::encoding::Encoded::take(from).map($name)
            }
        }
    };
}
pub(crate) use fields;

/// The numbers of an enum's variants, and the order of their fields.
macro_rules! variants {
    ($name:ident {
        $($number:literal => $variant:ident $({ $($field:ident),* })? $(($inner:ident))?),* $(,)?
    }) => {
        impl $crate::encoding::Encoded for $name {
            fn put(&self, out: &mut $crate::encoding::Writer) {
                match self {
                    $($name::$variant $({ $($field),* })? $(($inner))? => {
                        out.bytes(&[$number]);
                        $($($crate::encoding::Encoded::put($field, out);)*)?
                        $($crate::encoding::Encoded::put($inner, out);)?
                    })*
                }
            }

            fn take(
                from: &mut $crate::encoding::Reader<'_>,
            ) -> Result<$name, $crate::encoding::Refused> {
                match <u8 as $crate::encoding::Encoded>::take(from)? {
                    $($number => {
                        $($(let $field = $crate::encoding::Encoded::take(from)?;)*)?
                        $(let $inner = $crate::encoding::Encoded::take(from)?;)?
                        Ok($name::$variant $({ $($field),* })? $(($inner))?)
                    })*
                    _ => Err($crate::encoding::Refused::Value(stringify!($name))),
                }
            }
        }
    };
}
pub(crate) use variants;

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl Encoded for $number {
            fn put(&self, out: &mut Writer) {
                out.bytes(&self.to_le_bytes());
            }

            fn take(from: &mut Reader<'_>) -> Result<$number, Refused> {
                from.array().map(<$number>::from_le_bytes)
            }
        })*
    };
}
numbers!(u8, u16, u32, u64, i64);

/// Encoded as a 64-bit number on every machine.
impl Encoded for usize {
    fn put(&self, out: &mut Writer) {
        (*self as u64).put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<usize, Refused> {
        usize::try_from(u64::take(from)?).map_err(|_| Refused::Value(""))
    }
}

impl Encoded for bool {
    fn put(&self, out: &mut Writer) {
        u8::from(*self).put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<bool, Refused> {
        match u8::take(from)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Refused::Value("")),
        }
    }
}

/// Durations above five centuries are capped.
impl Encoded for Duration {
    fn put(&self, out: &mut Writer) {
        u64::try_from(self.as_nanos()).unwrap_or(u64::MAX).put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Duration, Refused> {
        u64::take(from).map(Duration::from_nanos)
    }
}

impl Encoded for Instant {
    fn put(&self, out: &mut Writer) {
        self.as_nanos().put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Instant, Refused> {
        u64::take(from).map(Instant::from_nanos)
    }
}

impl Encoded for SeqNum {
    fn put(&self, out: &mut Writer) {
        self.0.put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<SeqNum, Refused> {
        u32::take(from).map(SeqNum)
    }
}

impl<T: Encoded> Encoded for Option<T> {
    fn put(&self, out: &mut Writer) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(from: &mut Reader<'_>) -> Result<Option<T>, Refused> {
        bool::take(from)?.then(|| T::take(from)).transpose()
    }
}

impl<T: Encoded> Encoded for Box<T> {
    fn put(&self, out: &mut Writer) {
        (**self).put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Box<T>, Refused> {
        T::take(from).map(Box::new)
    }
}

impl<A: Encoded, B: Encoded> Encoded for (A, B) {
    fn put(&self, out: &mut Writer) {
        self.0.put(out);
        self.1.put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<(A, B), Refused> {
        Ok((A::take(from)?, B::take(from)?))
    }
}

impl<T: Encoded + Default + Copy, const N: usize> Encoded for [T; N] {
    fn put(&self, out: &mut Writer) {
        for item in self {
            item.put(out);
        }
    }

    fn take(from: &mut Reader<'_>) -> Result<[T; N], Refused> {
        let mut items = [T::default(); N];
        for item in &mut items {
            *item = T::take(from)?;
        }
        Ok(items)
    }
}

/// Writes the number of items, then each item.
fn put_all<'a, T: Encoded + 'a>(items: impl ExactSizeIterator<Item = &'a T>, out: &mut Writer) {
    (items.len() as u32).put(out);
    for item in items {
        item.put(out);
    }
}

fn take_all<T: Encoded, C: FromIterator<T>>(from: &mut Reader<'_>) -> Result<C, Refused> {
    let count = from.count()?;
    (0..count).map(|_| T::take(from)).collect()
}

impl<T: Encoded, const N: usize> Encoded for ArrayVec<T, N> {
    fn put(&self, out: &mut Writer) {
        put_all(self.iter(), out);
    }

    fn take(from: &mut Reader<'_>) -> Result<ArrayVec<T, N>, Refused> {
        let count = from.count()?;
        let mut items = ArrayVec::new();
        for _ in 0..count {
            let item = T::take(from)?;
            items.try_push(item).map_err(|_| Refused::Value(""))?;
        }
        Ok(items)
    }
}

impl<T: Encoded> Encoded for VecDeque<T> {
    fn put(&self, out: &mut Writer) {
        put_all(self.iter(), out);
    }

    fn take(from: &mut Reader<'_>) -> Result<VecDeque<T>, Refused> {
        take_all(from)
    }
}

impl<T: Encoded> Encoded for Vec<T> {
    fn put(&self, out: &mut Writer) {
        put_all(self.iter(), out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Vec<T>, Refused> {
        take_all(from)
    }
}

impl Encoded for Handle {
    fn put(&self, out: &mut Writer) {
        self.index.put(out);
        self.nonce.put(out);
        self.marker.put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Handle, Refused> {
        Ok(Handle {
            index: u16::take(from)?,
            nonce: u64::take(from)?,
            marker: u8::take(from)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed<T: Encoded>(bytes: &[u8]) -> Result<T, Refused> {
        let capsule = [&[VERSION], bytes].concat();
        let mut reader = Reader::new(&capsule)?;
        T::take(&mut reader)
    }

    #[test]
    fn what_is_written_is_read() {
        let value = (
            Some(Duration::from_micros(7)),
            vec![SeqNum(1), SeqNum(u32::MAX)],
        );
        let mut writer = Writer::new(0);
        value.put(&mut writer);
        let bytes = writer.finish();
        assert_eq!(bytes.len(), 1 + 9 + 4 + 8);
        let mut reader = Reader::new(&bytes).expect("this version");
        assert_eq!(Encoded::take(&mut reader), Ok(value));
    }

    #[test]
    fn what_is_no_value_is_refused_by_name() {
        assert_eq!(parsed::<bool>(&[2]), Err(Refused::Value("")));
        assert_eq!(
            parsed::<crate::send::CaState>(&[9]),
            Err(Refused::Value("CaState"))
        );
        let refused = Refused::Value("").of("Timers::pace");
        assert_eq!(refused.to_string(), "capsule has no value of Timers::pace");
        assert_eq!(refused.of("another"), refused);
    }

    #[test]
    fn no_number_of_items_asks_for_more_than_there_is() {
        let many = parsed::<Vec<u8>>(&[0xff, 0xff, 0xff, 0xff, 1]);
        assert_eq!(many, Err(Refused::Short));
        let full = parsed::<ArrayVec<u8, 2>>(&[3, 0, 0, 0, 1, 2, 3]);
        assert_eq!(full, Err(Refused::Value("")));
    }

    #[test]
    fn other_versions_are_refused() {
        assert_eq!(Reader::new(&[2, 0]).unwrap_err(), Refused::Version(2));
        assert_eq!(Reader::new(&[]).unwrap_err(), Refused::Short);
    }
}
