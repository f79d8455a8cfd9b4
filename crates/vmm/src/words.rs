//! Names of enum values, from the serde declaration of the enum.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde::de::value::{Error, StrDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer as _, Visitor};
use serde::{Deserialize, Serialize, forward_to_deserialize_any};

/// The names of the variants of `T`, an enum of unit variants.
pub fn words<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    let mut words: &'static [&'static str] = &[];
    // Always an error: there is no value to deserialize.
    let _ = T::deserialize(Words(&mut words));
    words
}

/// The value named `word`.
pub fn from_word<T: DeserializeOwned>(word: &str) -> Option<T> {
    let word: StrDeserializer<'_, Error> = word.into_deserializer();
    T::deserialize(word).ok()
}

/// The name of `value`.
pub fn to_word(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        other => format!("{other:?}"),
    }
}

/// The schema of an enum of another crate.
pub fn one_of<T: DeserializeOwned>(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "enum": words::<T>() })
}

/// Records the variant names that deserialization passes.
struct Words<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Words<'_> {
    type Error = Error;

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        *self.0 = variants;
        Err(serde::de::Error::custom("nothing is there"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(serde::de::Error::custom("not an enum"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{MergeBackend, Switch};

    #[test]
    fn words_are_those_of_the_declaration() {
        assert_eq!(words::<Switch>(), ["on", "off"]);
        assert_eq!(from_word("kernel"), Some(MergeBackend::Kernel));
        assert_eq!(from_word::<MergeBackend>("ksm"), None);
        assert_eq!(to_word(MergeBackend::Owner), "owner");
        assert!(words::<u32>().is_empty(), "not an enum");
    }
}
