//! Random values of any deserialisable type, of the right structure, with the harness's known names where they mean
//! something to the server.

use std::fmt;

use serde::de::value::U32Deserializer;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, SeqAccess, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

/// SplitMix64: the same values for the same seed.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.number() % bound.max(1) as u64) as usize
    }

    /// Returns true in one of `times` calls on average.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.below(all.len()))
    }

    /// Returns an integer, mostly small or at a limit.
    fn integer(&mut self) -> u64 {
        let whole = self.number();
        match self.below(6) {
            0 => whole,
            1 => u64::MAX >> self.below(64),
            2 => 1 << self.below(64),
            _ => whole % 20,
        }
    }
}

/// Known names of sessions and slots.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    pub sessions: Vec<u64>,
    pub slots: Vec<u32>,
}

/// Makes a value of the type.
pub(crate) fn any<T: serde::de::DeserializeOwned>(random: &mut Random, known: &Known) -> T {
    loop {
        // Values that the type itself refuses, such as a zero where none may be, are retried.
        if let Ok(value) = T::deserialize(Any { random, known }) {
            return value;
        }
    }
}

struct Any<'a> {
    random: &'a mut Random,
    known: &'a Known,
}

impl Any<'_> {
    fn again(&mut self) -> Any<'_> {
        Any {
            random: self.random,
            known: self.known,
        }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let longest = if self.random.once_in(10) { 3000 } else { 40 };
        let length = self.random.below(longest);
        (0..length).map(|_| self.random.number() as u8).collect()
    }
}

#[derive(Debug)]
pub(crate) struct Unfit(String);

impl fmt::Display for Unfit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Unfit {}

impl serde::de::Error for Unfit {
    fn custom<T: fmt::Display>(message: T) -> Unfit {
        Unfit(message.to_string())
    }
}

macro_rules! integers {
    ($($method:ident $visit:ident $type:ty),* $(,)?) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unfit> {
            visitor.$visit(self.random.integer() as $type)
        })*
    };
}

impl<'de> Deserializer<'de> for Any<'_> {
    type Error = Unfit;

    fn is_human_readable(&self) -> bool {
        false
    }

    integers! {
        deserialize_u8 visit_u8 u8,
        deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
        deserialize_u128 visit_u128 u128,
        deserialize_i8 visit_i8 i8,
        deserialize_i16 visit_i16 i16,
        deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64,
        deserialize_f32 visit_f32 f32,
        deserialize_f64 visit_f64 f64,
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unfit> {
        visitor.visit_bool(self.random.once_in(2))
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unfit> {
        visitor.visit_char(char::from(self.random.number() as u8))
    }

    fn deserialize_string<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Unfit> {
        let bytes = self.bytes();
        visitor.visit_string(bytes.into_iter().map(char::from).collect())
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Unfit> {
        visitor.visit_byte_buf(self.bytes())
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unfit> {
        self.deserialize_string(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unfit> {
        self.deserialize_byte_buf(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Unfit> {
        if self.random.once_in(2) {
            visitor.visit_none()
        } else {
            visitor.visit_some(self.again())
        }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unfit> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unfit> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        mut self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unfit> {
        let known = self.known;
        let named = match name {
            _ if self.random.once_in(8) => None,
            "SessionId" => self.random.of(&known.sessions).copied(),
            "Slot" => self.random.of(&known.slots).copied().map(u64::from),
            _ => None,
        };
        match named {
            Some(number) => visitor.visit_newtype_struct(number.into_deserializer()),
            None => visitor.visit_newtype_struct(self.again()),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unfit> {
        let left = self.random.below(6);
        visitor.visit_seq(Elements { any: self, left })
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        left: usize,
        visitor: V,
    ) -> Result<V::Value, Unfit> {
        visitor.visit_seq(Elements { any: self, left })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        left: usize,
        visitor: V,
    ) -> Result<V::Value, Unfit> {
        visitor.visit_seq(Elements { any: self, left })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unfit> {
        let left = fields.len();
        visitor.visit_seq(Elements { any: self, left })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unfit> {
        let chosen = self.random.below(variants.len()) as u32;
        visitor.visit_enum(Variant { any: self, chosen })
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Unfit> {
        Err(Unfit("the type does not say what it is".into()))
    }

    forward_to_deserialize_any! { i128 map identifier ignored_any }
}

struct Elements<'a> {
    any: Any<'a>,
    left: usize,
}

impl<'de> SeqAccess<'de> for Elements<'_> {
    type Error = Unfit;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Unfit> {
        let Some(left) = self.left.checked_sub(1) else {
            return Ok(None);
        };
        self.left = left;
        seed.deserialize(self.any.again()).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

struct Variant<'a> {
    any: Any<'a>,
    chosen: u32,
}

impl<'de, 'a> EnumAccess<'de> for Variant<'a> {
    type Error = Unfit;
    type Variant = Any<'a>;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Any<'a>), Unfit> {
        let chosen: U32Deserializer<Unfit> = self.chosen.into_deserializer();
        Ok((seed.deserialize(chosen)?, self.any))
    }
}

impl<'de> VariantAccess<'de> for Any<'_> {
    type Error = Unfit;

    fn unit_variant(self) -> Result<(), Unfit> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Unfit> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, left: usize, visitor: V) -> Result<V::Value, Unfit> {
        visitor.visit_seq(Elements { any: self, left })
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unfit> {
        let left = fields.len();
        visitor.visit_seq(Elements { any: self, left })
    }
}
