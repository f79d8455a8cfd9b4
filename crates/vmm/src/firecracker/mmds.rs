//! The store of the metadata service: one JSON document of a limited size.

use serde_json::Value;

use super::fault::Fault;

/// Deepest nesting of a change. serde_json parses no document that is deeper than 128.
const MOST_LEVELS: usize = 128;

/// The store. Firecracker serves it to the guest over the network.
#[derive(Debug)]
pub(super) struct Store {
    /// `None` until the first `PUT`.
    value: Option<Value>,
    max_bytes: usize,
}

impl Store {
    /// An empty store for documents of up to `max_bytes`.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { value: None, max_bytes }
    }

    /// The document; `{}` if there is none.
    pub(super) fn get(&self) -> Value {
        match &self.value {
            None | Some(Value::Null) => Value::Object(serde_json::Map::new()),
            Some(value) => value.clone(),
        }
    }

    /// Replaces the document.
    pub(super) fn put(&mut self, value: Value) -> Result<(), Fault> {
        self.value = Some(self.fitting(value)?);
        Ok(())
    }

    /// Merges `patch` into the document (RFC 7396).
    pub(super) fn patch(&mut self, patch: Value) -> Result<(), Fault> {
        let Some(mut value) = self.value.clone() else { return Err(uninitialized()) };
        merge(&mut value, patch, MOST_LEVELS);
        self.value = Some(self.fitting(value)?);
        Ok(())
    }

    fn fitting(&self, value: Value) -> Result<Value, Fault> {
        if value.to_string().len() > self.max_bytes {
            return Err(Fault::too_large(
                "MMDS limit exceeded error: The MMDS patch request doesn't fit.",
            ));
        }
        Ok(value)
    }
}

/// The refusal of a request for a store that is not there.
pub(super) fn uninitialized() -> Fault {
    Fault::new("MMDS error: The MMDS data store is not initialized.")
}

/// The function `MergePatch` of RFC 7396 section 2.
fn merge(target: &mut Value, patch: Value, levels: usize) {
    let (Value::Object(changes), Some(levels)) = (patch.clone(), levels.checked_sub(1)) else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(serde_json::Map::new());
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
            assert_eq!(store.patch(json!({})), Err(uninitialized()));
            store.put(before).unwrap();
            store.patch(patch).unwrap();
            assert_eq!(store.get(), after);
        }
    }

    #[test]
    fn a_document_that_does_not_fit_changes_nothing() {
        let mut store = Store::new(10);
        store.put(json!("a")).unwrap();
        assert!(store.put(json!("0123456789")).is_err());
        assert!(store.patch(json!({"0123456789": 1})).is_err());
        assert_eq!(store.get(), json!("a"));
    }
}
