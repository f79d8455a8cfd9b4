//! The store of the metadata service: one JSON document of a limited size.

use serde_json::{Map, Value};

/// Deepest nesting of a change. serde_json parses no document that is deeper than 128.
const MOST_LEVELS: usize = 128;

/// The store.
#[derive(Debug)]
pub(crate) struct Store {
    /// `None` until it is first replaced.
    value: Option<Value>,
    max_bytes: usize,
}

/// Why a document was not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreError {
    /// There is none.
    Uninitialized,
    /// The new one would not fit.
    TooLarge,
}

/// Why a part of the document cannot be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoText {
    /// It does not exist.
    NotFound,
    /// It is neither an object nor a string.
    Unsupported,
}

/// How a part of the document is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// As JSON.
    Json,
    /// As EC2's service does: names of members by line, a slash behind those of objects; strings
    /// as they are.
    Text,
}

impl Store {
    /// An empty store for documents of up to `max_bytes`.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { value: None, max_bytes }
    }

    /// The document; `{}` if there is none.
    pub(crate) fn get(&self) -> Value {
        match &self.value {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(value) => value.clone(),
        }
    }

    /// Replaces the document.
    pub(crate) fn put(&mut self, value: Value) -> Result<(), StoreError> {
        self.value = Some(self.fitting(value)?);
        Ok(())
    }

    /// Merges `patch` into the document (RFC 7396).
    pub(crate) fn patch(&mut self, patch: Value) -> Result<(), StoreError> {
        let mut value = self.value.clone().ok_or(StoreError::Uninitialized)?;
        merge(&mut value, patch, MOST_LEVELS);
        self.value = Some(self.fitting(value)?);
        Ok(())
    }

    fn fitting(&self, mut value: Value) -> Result<Value, StoreError> {
        if value.to_string().len() > self.max_bytes {
            return Err(StoreError::TooLarge);
        }
        // Guests read members in this order.
        value.sort_all_objects();
        Ok(value)
    }

    /// The part at `path` (RFC 6901), which may end with a slash.
    pub(super) fn show(&self, path: &str, format: Format) -> Result<String, NoText> {
        let part = self.value.as_ref().unwrap_or(&Value::Null);
        let part = part.pointer(path.strip_suffix('/').unwrap_or(path)).ok_or(NoText::NotFound)?;
        match (format, part) {
            (Format::Json, part) => Ok(part.to_string()),
            (Format::Text, Value::String(text)) => Ok(text.clone()),
            (Format::Text, Value::Object(members)) => {
                let line = |(name, member): (&String, &Value)| {
                    let slash = if member.is_object() { "/" } else { "" };
                    format!("{name}{slash}")
                };
                Ok(members.iter().map(line).collect::<Vec<_>>().join("\n"))
            }
            (Format::Text, _) => Err(NoText::Unsupported),
        }
    }
}

/// The function `MergePatch` of RFC 7396 section 2.
fn merge(target: &mut Value, patch: Value, levels: usize) {
    let (Value::Object(changes), Some(levels)) = (patch.clone(), levels.checked_sub(1)) else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(members) = target.as_object_mut() else { return };
    for (name, change) in changes {
        if change.is_null() {
            members.remove(&name);
        } else {
            merge(members.entry(name).or_insert(Value::Null), change, levels);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The examples of RFC 7396, appendix A.
    #[test]
    fn changes_are_merged_as_the_standard_says() {
        for (before, patch, after) in [
            (json!({"a":"b"}), json!({"a":"c"}), json!({"a":"c"})),
            (json!({"a":"b"}), json!({"b":"c"}), json!({"a":"b","b":"c"})),
            (json!({"a":"b"}), json!({"a":null}), json!({})),
            (json!({"a":"b","b":"c"}), json!({"a":null}), json!({"b":"c"})),
            (json!({"a":["b"]}), json!({"a":"c"}), json!({"a":"c"})),
            (json!({"a":{"b":"c"}}), json!({"a":{"b":"d","c":null}}), json!({"a":{"b":"d"}})),
            (json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"])),
            (json!({"e":null}), json!({"a":1}), json!({"e":null,"a":1})),
            (json!([1, 2]), json!({"a":"b","c":null}), json!({"a":"b"})),
            (json!({}), json!({"a":{"bb":{"ccc":null}}}), json!({"a":{"bb":{}}})),
        ] {
            let mut store = Store::new(100);
            assert_eq!(store.patch(json!({})), Err(StoreError::Uninitialized));
            store.put(before).unwrap();
            store.patch(patch).unwrap();
            assert_eq!(store.get(), after);
        }
    }

    #[test]
    fn a_document_that_does_not_fit_changes_nothing() {
        let mut store = Store::new(10);
        store.put(json!("a")).unwrap();
        assert_eq!(store.put(json!("0123456789")), Err(StoreError::TooLarge));
        assert_eq!(store.patch(json!({"0123456789": 1})), Err(StoreError::TooLarge));
        assert_eq!(store.get(), json!("a"));
    }

    #[test]
    fn parts_are_shown_as_json_or_as_lines() {
        let mut store = Store::new(100);
        assert_eq!(store.show("/", Format::Json).as_deref(), Ok("null"));
        assert_eq!(store.show("/a", Format::Json), Err(NoText::NotFound));
        store.put(json!({"b": {"x/y": "z", "n": 3, "l": [7]}, "a": "text\n"})).unwrap();
        for (path, format, shown) in [
            ("/", Format::Text, Ok("a\nb/")),
            ("", Format::Text, Ok("a\nb/")),
            ("/b", Format::Text, Ok("l\nn\nx/y")),
            ("/b/", Format::Json, Ok(r#"{"l":[7],"n":3,"x/y":"z"}"#)),
            ("/b/x~1y", Format::Text, Ok("z")),
            ("/b/l/0", Format::Json, Ok("7")),
            ("/a", Format::Text, Ok("text\n")),
            ("/a", Format::Json, Ok(r#""text\n""#)),
            ("/b/n", Format::Text, Err(NoText::Unsupported)),
            ("/b/l", Format::Text, Err(NoText::Unsupported)),
            ("/b//", Format::Text, Err(NoText::NotFound)),
            ("b", Format::Json, Err(NoText::NotFound)),
        ] {
            assert_eq!(store.show(path, format), shown.map(str::to_owned), "{path:?} {format:?}");
        }
    }
}
